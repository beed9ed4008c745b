"""A result where another one lies: in what their questions differ, and what is left of the other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatrock.core.errors import StateError
from flatrock.core.files import json_text
from flatrock.core.records import Result
from flatrock.core.tensorfile import role_of

# What provenance keeps of a question, and what a user calls it.
_NAMES = {
    **{"model": "model", "weights_sha256": "weights", "weights_digest": "model", "weights_entry": "which"},
    **{"normalize": "normalize", "recipe": "recipe", "recipe_hash": "recipe", "checkpoint": "checkpoint"},
    **{"epoch": "epoch", "samples_digest": "data", "seed": "seed", "precision": "precision", "votes": "votes"},
    **{"dataset": "data", "model_code": "code of the model"},
}
# Not known of every result: of those of older versions, or of one that is still to be made.
_PERHAPS = ("weights_digest", "precision", "model_code", "dataset")


def question_of(threat: Mapping[str, Any], attacks: Iterable[str], about: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked, as far as provenance says it; `attacks` are names, with plans as a whole."""
    told = {key: about.get(key) for key in _NAMES if key in about or key not in _PERHAPS}
    told |= {"attacks": sorted(attacks), "surrogate": about.get("surrogate", {}).get("weights")}
    # As files have it: what came out of one has lists and no tuples.
    return dict(json.loads(json_text({**threat, **told})))


@dataclass(frozen=True)
class Other:
    """A result of another question, whose place one takes: in what they differ, and pictures that may be of it."""

    different: tuple[str, ...]
    pictures: tuple[Path, ...]


def other_in(target: Path, result: Result) -> Other | None:
    """The result in a file, if it answers another question than the one that takes its place."""
    old = _read(target)
    odd = [] if old is None else _names(_question(old), _question(result))
    if old is None or not odd:
        return None
    names = [name for name in (*old.plans, "gallery") if name not in result.plans]
    drawn = (target.with_name(f"{target.stem}-{name}.png") for name in names)
    return Other(tuple(odd), tuple(file for file in drawn if file.is_file()))


def check_other(target: Path, question: Mapping[str, Any]) -> None:
    """StateError if the result in a file, which is to be read or made anew, answers another question."""
    old = _read(target)
    if odd := [] if old is None else _names(_question(old), question):
        raise StateError(
            f"{target} is the result of another evaluation (different: {', '.join(odd)}); repeat its options, choose "
            "another --out (out=...), or leave out --resume (resume=True) to replace it"
        )


def discard_inputs(target: Path) -> None:
    """Remove the inputs kept beside a result that is replaced; something else of that name is not ours."""
    if role_of(kept := adversarial_file(target)) == "adversarial":
        kept.unlink()


def adversarial_file(result: Path) -> Path:
    """Where the inputs behind a result file are kept; not under its name alone: weights may lie there."""
    return result.with_name(f"{result.stem}-adversarial.safetensors")


def _read(target: Path) -> Result | None:
    try:
        return Result.from_json(target.read_text(), str(target))
    except (OSError, UnicodeDecodeError, StateError):
        return None


def _question(result: Result) -> dict[str, Any]:
    asked = question_of(result.threat, result.per_attack, result.provenance)
    return {**asked, "options": json.loads(json_text({k: dict(v) for k, v in result.attacks.items()}))}


def _names(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs of that which is known of both, in a user's words."""
    odd = [key for key in old.keys() & new.keys() if old[key] != new[key]]
    return sorted({{**_NAMES, "options": "attacks"}.get(key, key) for key in odd})
