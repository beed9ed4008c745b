"""Run folders and result files -> stories: what there is to tell of each model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.provenance import checkpoint_of, origin
from flatrock.core.records import read_result
from flatrock.core.rows import read_rows
from flatrock.core.story import Story
from flatrock.engine.folder import OWN_FILE, RunFolder
from flatrock.workflows.results import of_other_weights


def stories(sources: Sequence[Path]) -> list[Story]:
    """One of each run folder or result file; two of one name are told apart by their paths."""
    places = [source.resolve() for source in sources]
    if twice := [str(s) for s, place in zip(sources, places, strict=True) if places.count(place) > 1]:
        raise ConfigError(f"{twice[0]} is named twice; leave one out")
    found = [_of_run(source) if source.is_dir() else _of_result(source) for source in sources]
    names = [story.name for story in found]
    return [
        Story(**{**vars(story), "name": str(source)}) if names.count(story.name) > 1 else story
        for story, source in zip(found, sources, strict=True)
    ]


def _of_run(path: Path) -> Story:
    folder = RunFolder(path)
    run = folder.run()
    files = sorted(path.glob("result-*.json"))
    known_by = "best" if run.average_collapsed else folder.known_by()
    read = {file.stem: read_result(file) for file in files}
    which = {name: checkpoint_of(result.provenance) for name, result in read.items()}
    read = dict(sorted(read.items(), key=lambda item: (which[item[0]] != known_by, item[0])))
    stale = [name for name, result in read.items() if of_other_weights(result, which[name], folder)]
    remarks = [f"left out {name}.json: of other weights than the run has now; evaluate again" for name in stale]
    if told := folder.to_be_ended():
        remarks.append(f"the run is not finished: it {told}")
    return Story(
        name=path.resolve().name,
        results={name: result for name, result in read.items() if name not in stale},
        run=run,
        known_by=known_by,
        recipe=folder.recipe.read_text() if folder.recipe.is_file() else "",
        about=folder.provenance(),
        pictures=_pictures(path),
        remarks=tuple(remarks),
    )


def _of_result(file: Path) -> Story:
    if file.suffix == ".json" and read_rows(file) is not None:
        raise StateError(f"{file} holds rows of many runs, for `flatrock report`; name run folders or result-*.json")
    result = read_result(file)
    name, weights = origin(result.provenance)
    return Story(name=f"{name} {weights}".strip(), results={file.stem: result})


def _pictures(path: Path) -> tuple[Path, ...]:
    """What flatrock has drawn there, but for what is drawn from the records anyway."""
    drawn = [file for file in sorted(path.glob("*.png")) if OWN_FILE.fullmatch(file.name)]
    plans = {f"{result.stem}-{plan}" for result in path.glob("result-*.json") for plan in read_result(result).plans}
    return tuple(file for file in drawn if file.stem not in {"curves", *plans})
