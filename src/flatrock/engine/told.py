"""What a run tells whoever listens, or is told by a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from flatrock.core.progress import Progress, Silent
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job


def tell_anew(folder: RunFolder, listener: Progress) -> None:
    """Say what was not asked for."""
    tell_all(f"there is nothing to resume in {folder.path}; a new run begins", listener, inside=0)


def tell_all(text: str, listener: Progress, *, inside: int) -> None:
    """Say something, to a caller without listener too; asked for so many calls `inside` of what train_recipe calls."""
    if type(listener) is Silent:  # one of the user's may derive from it
        warnings.warn(text, stacklevel=6 + inside)  # of whoever calls flatrock.train
    else:
        listener.say(text)


def tell_changed(own: Mapping[str, str], folder: RunFolder, progress: Progress, *, inside: int = 0) -> None:
    """Say which files with code of the user's, given with their digests, the run last began with other versions of."""
    last = folder.provenance().get("own", {})
    changed = [file for file, digest in own.items() if last.get(file, digest) != digest]
    if changed:
        since = "changed since the run was last at work; it goes on with what is there now"
        tell_all(f"{' and '.join(changed)} {since}, and run.json has the digests of both", progress, inside=inside)


def tell_resumed(job: Job, folder: RunFolder, progress: Progress) -> None:
    """Say what is not as it was when the run was last at work, or began; asked for by what `train` calls."""
    if job.team.alone:  # else whoever began the processes has told it
        tell_changed(job.provenance.get("own", {}), folder, progress, inside=3)
    began, now = ((about.get("engine") or {}).get("precision") for about in (folder.began(), job.provenance))
    if began in (None, now):
        return
    told = f"{folder.path} continues in {now}, began in {began}; run.json and its row of results name both"
    if job.team.alone:
        tell_all(told, progress, inside=2)
    else:
        progress.say(told)


def tell_findings(folder: RunFolder, progress: Progress, findings: Sequence[str]) -> None:
    """Say once what is to be known of a run; run.json keeps it."""
    known = list(folder.read_info().get("findings", ()))
    new = [text for text in findings if text not in known]
    for text in new:
        progress.say(text)
    if new:
        folder.write_info(findings=known + new)
