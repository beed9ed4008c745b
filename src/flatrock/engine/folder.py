"""The run folder: what lies where, and who may write into it.

recipe.yaml       the resolved recipe            state.safetensors  everything needed to resume (and one older copy)
run.json          provenance and status          best.safetensors   weights of the best epoch on the selection data
metrics.jsonl     one sealed record per epoch    last.safetensors   weights after the last finished epoch
tensorboard/      the same figures as events     epoch-0100.safetensors  weights the recipe's `keep` asked for
failure.txt       where an error came from       average-best, average-last  the same of averaged weights, if kept
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flatrock.core.errors import StateError
from flatrock.core.files import json_text, sealed_line, unsealed, write_atomic
from flatrock.core.locks import is_held, locked
from flatrock.core.runs import EpochRecord, Run
from flatrock.engine.writer import Writer

STATUSES = ("running", "interrupted", "finished", "truncated", "failed")
# Of runs that can go on; one that was killed could not write that it is no longer running.
UNENDED = ("running", "interrupted")
# Of runs that are what their recipes say, to the end (of train.max_steps, where that comes first).
ENDED = ("finished", "truncated")
AT_WORK = "a process is training it now"
# Exactly the names a run writes; anything else in the folder is the user's and is never touched.
OWN_FILE = re.compile(
    r"\.?(recipe\.yaml|run\.json|metrics\.jsonl|failure\.txt|curves\.png|page\.html|overfit\.(json|png|svg)"
    r"|(state(\.older)?|(average-)?(best|last)|epoch-\d{4,})\.safetensors|state\.safetensors\.damaged"
    r"|result-((average-)?(best|last)|state|epoch-\d{4,})(-[\w.=+-]+)?\.(json|safetensors|part(\.lock)?|png)|\.lock)(\.part)?"
    r"|\.?(landscape|curvature|certificate)-[\w.=+-]+\.(json|tsv|part(\.lock)?|png|svg|html)(\.part)?"
)


class RunFolder:
    """Paths and small files of one run; `writer` stores what training leaves there."""

    def __init__(self, path: Path, writer: Writer | None = None) -> None:
        self.path = path
        self.writer = writer or Writer(beside=False)
        self.recipe = path / "recipe.yaml"
        self.info = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.failure = path / "failure.txt"
        self.state = path / "state.safetensors"
        self.older_state = path / "state.older.safetensors"
        self.damaged_state = path / "state.safetensors.damaged"
        self.best = path / "best.safetensors"
        self.last = path / "last.safetensors"
        self.average_best = path / "average-best.safetensors"
        self.average_last = path / "average-last.safetensors"
        self.lock = path / ".lock"
        self.tensorboard = path / "tensorboard"

    def epoch(self, epoch: int) -> Path:
        """Weights kept after this epoch."""
        return self.path / f"epoch-{epoch:04d}.safetensors"

    @contextmanager
    def locked(self, doing: str = "training into") -> Iterator[None]:
        """Keep other processes from working in this folder; the lock ends with the process, however it ends."""
        with locked(self.lock, doing, self.path):
            yield

    def claim(self, *, overwrite: bool) -> None:
        """Make the folder ours for a fresh run; refuse to touch what is there unless told to."""
        if self.path.exists() and not self.path.is_dir():
            raise StateError(f"{self.path} is a file; choose another run folder")
        if self.in_use():
            if not overwrite:
                raise StateError(
                    f"run folder {self.path} exists; continue it with --resume, replace it with --overwrite, "
                    "or choose another with --run-dir (in Python: resume=True, overwrite=True, folder=...)"
                )
            if not (self.info.is_file() or self.barely_begun()):
                raise StateError(f"{self.path} holds something that is not a flatrock run; it is left alone")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(
                f"cannot create run folder {self.path}: {error.strerror}; choose another with --run-dir "
                "(in Python: folder=...)"
            ) from error

    def check_resumable(self) -> None:
        """Refuse early, and without leaving a trace, where there is nothing to resume."""
        if not self.begun():
            raise StateError(f"{self.path} cannot be resumed: there is no {self.state.name}; {self.anew()}")

    def anew(self) -> str:
        """What can be done about a run without a state that can be read; never what would destroy finished work."""
        if not (self.info.is_file() or self.barely_begun()):
            return "it is not a flatrock run, and is left alone; choose another --run-dir (in Python: folder=...)"
        with suppress(StateError):
            if self.read_info()["status"] in ENDED:
                return "the run has ended and needs no state: use it as it is, and delete states that are damaged"
        if not (self.last.exists() or self.metrics.exists()):
            return "start again with --overwrite (in Python: overwrite=True): no epoch of it was finished"
        return (
            "train it anew in another --run-dir (in Python: folder=...), which leaves its epochs there to look at, or "
            "in their place with --overwrite (in Python: overwrite=True)"
        )

    def begun(self) -> bool:
        """Whether there is a state to go on from."""
        return self.state.exists() or self.older_state.exists()

    def known_by(self) -> str:
        """The checkpoint meant by the run: the best epoch, of the averaged weights where they are kept."""
        return "average-best" if self.read_info().get("averages") else "best"

    def kept(self) -> str:
        """What there is to look at of a run that failed, in a sentence."""
        if self.last.exists():
            return "The weights of the last finished epoch are kept"
        return "No epoch was finished: there are no weights to look at"

    def in_use(self) -> bool:
        """Whether anything but a lock lies in the folder."""
        return self.path.is_dir() and any(p != self.lock for p in self.path.iterdir())

    def barely_begun(self) -> bool:
        """Whether a run was killed before run.json, the first file it writes, was whole."""
        first = (self.info, self.failure)  # of an error before there was a run, `reproduce` keeps where it came from
        known = {self.lock.name, self.failure.name, *(f".{file.name}.part" for file in first)}
        return {p.name for p in self.path.iterdir()} <= known

    def clear(self) -> None:
        """Remove only the files a run writes."""
        for file in self.path.iterdir():
            if OWN_FILE.fullmatch(file.name) and file != self.lock:
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        shutil.rmtree(self.tensorboard, ignore_errors=True)

    def write_info(self, **values: Any) -> None:
        """Merge values into run.json, where None removes one; a damaged file is written anew."""
        try:
            old = self.read_info()
        except StateError:
            old = {}
        merged = {name: value for name, value in {**old, **values}.items() if value is not None}
        write_atomic(self.info, json.dumps(merged, indent=2, sort_keys=True).encode())

    def read_info(self) -> dict[str, Any]:
        """Content of run.json; StateError if it is missing or damaged."""
        try:
            info = json.loads(self.info.read_text())
        except FileNotFoundError as error:
            raise StateError(f"{self.path} is not a run folder: it has no run.json") from error
        except (ValueError, OSError) as error:
            raise StateError(f"{self.info} is damaged ({error}); train again with --resume to rewrite it") from error
        if not isinstance(info, dict) or info.get("status") not in STATUSES or "recipe_hash" not in info:
            raise StateError(f"{self.info} is damaged; train again with --resume to rewrite it")
        return info

    def ended(self) -> bool:
        """Whether run.json says that the run is what its recipe says, to the end."""
        try:
            return self.read_info()["status"] in ENDED
        except StateError:
            return False

    def unfinished(self) -> str:
        """Where a run stands that has not ended, in words; nothing if it has."""
        info = self.read_info()
        if info["status"] not in UNENDED:
            return ""
        if info["status"] == "interrupted":
            return f"interrupted: {info.get('reason') or 'nobody knows by what'}"
        told = {True: AT_WORK, False: "its process is gone"}
        held = is_held(self.lock)
        return "its process is at work, or gone" if held is None else told[held]

    def check_ended(self, *, cure: str = "") -> None:
        """StateError of a run that has not; `cure` is what else can be done."""
        if told := self.to_be_ended():
            raise StateError(f"run {self.path} is not finished {told}{cure}")

    def to_be_ended(self) -> str:
        """Where a run stands that has not ended, and the cure; nothing if it has."""
        why = self.unfinished()
        how = "wait for it" if why == AT_WORK else "train on with --resume"
        return f"({why}); {how}" if why else ""

    def began(self) -> Mapping[str, Any]:
        """Provenance of the run's beginning; empty if run.json does not say."""
        try:
            return dict(self.read_info().get("provenance", {}))
        except StateError:
            return {}

    def resumptions(self) -> list[Any]:
        """Provenance of each time the run was resumed; empty if run.json does not say."""
        try:
            return list(self.read_info().get("resumed", []))
        except StateError:
            return []

    def provenance(self) -> Mapping[str, Any]:
        """That of the last time the run began or was resumed; empty if run.json does not say."""
        try:
            info = self.read_info()
        except StateError:
            return {}
        return dict([info.get("provenance", {}), *info.get("resumed", [])][-1])

    def append(self, record: EpochRecord, owner: str) -> None:
        """Add one epoch of the run of this recipe hash to metrics.jsonl."""
        try:
            with self.metrics.open("a") as f:
                f.write(sealed_line(record.to_dict(), owner) + "\n")
        except OSError as error:
            raise StateError(f"could not write {self.metrics}: {error.strerror}; free space, then --resume") from error

    def rewrite(self, records: Sequence[EpochRecord]) -> None:
        """Make metrics.jsonl hold exactly these records."""
        lines = [sealed_line(r.to_dict(), self.owner()) + "\n" for r in records]
        write_atomic(self.metrics, "".join(lines).encode())

    def owner(self) -> str:
        """The recipe hash lines of metrics.jsonl are sealed with."""
        return str(self.read_info()["recipe_hash"])

    def records(self) -> list[EpochRecord]:
        """The epochs on disk, in order; StateError if a line was damaged, lost or of another run."""
        if not self.metrics.exists():
            return []
        owner = self.owner()
        try:
            lines = self.metrics.read_text().splitlines()
        except (UnicodeDecodeError, OSError) as error:
            raise StateError(f"{self.metrics} is damaged ({error}); `train --resume` rebuilds it") from error
        rows = [unsealed(line, f"{self.metrics}, line {i}", owner) for i, line in enumerate(lines, 1)]
        if [r["epoch"] for r in rows] != list(range(1, len(rows) + 1)):
            raise StateError(f"{self.metrics} has lost epochs; `train --resume` rebuilds it from the checkpoint")
        return [EpochRecord.from_dict(r) for r in rows]

    def run(self) -> Run:
        """The run as it stands on disk."""
        info = self.read_info()
        records = self.records()
        if info["status"] in ENDED and len(records) != info.get("epochs_done"):
            raise StateError(f"{self.metrics} has lost epochs; `train --resume` rebuilds it from the checkpoint")
        findings = tuple(str(text) for text in info.get("findings", ()))
        return Run(self.path, tuple(records), str(info["status"]), str(info.get("reason", "")), findings)

    def write_recipe(self, text: str) -> None:
        """Store the resolved recipe."""
        write_atomic(self.recipe, text.encode())


def changed_paths(a: Any, b: Any, where: str = "") -> list[str]:
    """Dotted paths at which two nested values differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(a.keys() | b.keys())
        return [d for k in keys for d in changed_paths(a.get(k), b.get(k), f"{where}.{k}" if where else str(k))]
    return [] if json_text(a) == json_text(b) else [f"{where}: {b!r} there, {a!r} asked for"]
