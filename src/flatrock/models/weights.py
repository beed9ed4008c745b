"""Weight files of other projects: read without running code, taken apart, fitted to a network by name and shape."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.registry import unknown
from flatrock.core.tensorfile import FORMAT
from flatrock.models.wrapping import told_parts, under

Shapes = Mapping[str, tuple[int, ...]]

# Entries of a checkpoint that hold averaged weights, then those that hold plain ones; the first found is taken.
AVERAGED = ("ema", "ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "swa", "swa_state_dict", "swa_model")
_PLAIN = (
    *("state_dict", "model_state_dict", "model_state", "model", "net", "network", "weights", "last", "best"),
    "rmodel",  # MAIR's
)
# BatchNorm's counter: no prediction depends on it.
_BATCH_COUNTER = "num_batches_tracked"
# Names shown of a long list.
_SHOWN = 5


@dataclass(frozen=True)
class Weights:
    """The tensors of one model in a file: under which entry they lay, which other models lay beside them."""

    state: dict[str, Tensor]
    file: Path
    sha256: str
    entry: str
    others: tuple[str, ...]

    @property
    def averaged(self) -> bool:
        """Whether they are averages over training."""
        return any(step in AVERAGED for step in self.entry.split("."))


def read_weights(path: Path | str, *, which: str = "auto") -> Weights:
    """The weights in a safetensors or torch file. No pickle is executed: a torch file that needs it is refused.

    Checkpoints are unwrapped. `which` names the entry to take where there are several, or what the names of one of
    several networks begin with, without the dot; auto prefers averaged weights.
    """
    path = Path(path)
    if not path.is_file():
        raise StateError(f"there is no weights file {path}")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    state, entry, others = _unwrap(content, path, which)
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    return Weights(state, path, digest, entry, others)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as f:
            header = f.metadata() or {}
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise StateError(f"{path} cannot be read as safetensors ({error}); {_download(path)}") from error
    if header.get("format") == FORMAT:
        raise StateError(
            f"{path} is a checkpoint of a flatrock run, which knows its recipe; name it as one, "
            f"without --weights, as in `flatrock eval {shlex.quote(str(path))}`"
        )
    return tensors


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about TorchScript archives, which are refused anyway
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds here, and its own message recommends running the pickle
        if kind := _archive(path):
            raise StateError(f"{path} {kind}") from error
        match = re.search(r"Unsupported (?:global|class):? (?:GLOBAL )?([\w.]+)", str(error))
        if match is None:
            raise StateError(f"{path} is no whole torch file; {_download(path)}") from error
        raise StateError(
            f"{path} holds a {match[1]}, and reading it would run code from the file, so it is refused; if you trust "
            "where it comes from, keep its tensors alone, once, as plain.pt: "
            f"python -c {shlex.quote(_keep_tensors(path))}"
        ) from error


def _keep_tensors(path: Path) -> str:
    """Python that stores the tensors of a model, a state dict or a checkpoint of either, under whatever names."""
    return (
        'import torch; plain = lambda v: v.state_dict() if hasattr(v, "state_dict") else v; '
        "good = lambda v: torch.is_tensor(v) or isinstance(v, dict) and all(map(torch.is_tensor, v.values())); "
        f'd = plain(torch.load({json.dumps(str(path))}, map_location="cpu", weights_only=False)); '
        'torch.save({k: plain(v) for k, v in d.items() if good(plain(v))}, "plain.pt")'
    )


def _archive(path: Path) -> str:
    """What a whole zip archive is that torch.save did not write, and what to do with it; nothing if it is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            inside = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return ""
    name = json.dumps(str(path))
    if any(re.fullmatch(r"[^/]+/(constants\.pkl|code/.*)", each) for each in inside):
        return (
            "is a TorchScript archive, a network with its code and no state dict; write a factory into a file, such as "
            f"mynets.py: `import torch` and `def make(): return torch.jit.load({name})`; then name --model mynets:make "
            "without --weights"
        )
    if inside and all(each.endswith(".npy") for each in inside):
        script = (
            f"import numpy, torch; d = numpy.load({name}); "
            'torch.save({k: torch.as_tensor(d[k]) for k in d.files}, "plain.pt")'
        )
        return (
            "holds arrays of numpy; if their names and shapes are those of a state dict, store them as one, once, as "
            f"plain.pt: python -c {shlex.quote(script)}"
        )
    return ""


def _download(path: Path) -> str:
    """What the first bytes of an unreadable file say."""
    with path.open("rb") as f:
        begin = f.read(64).lstrip()
    if begin.startswith(b"<"):
        return "it is a web page, saved instead of the file; download it again in a browser"
    if begin.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS; fetch the file itself with `git lfs pull`"
    return "it is damaged or of another kind; download it again, or save its state_dict() with torch.save"


def _unwrap(content: Any, path: Path, which: str) -> tuple[dict[str, Tensor], str, tuple[str, ...]]:
    """Go down through entries that hold models until there are tensors."""
    entry: list[str] = []
    others: list[str] = []
    while True:
        if not isinstance(content, Mapping):
            raise StateError(f"{path} holds a {type(content).__name__}, not a state dict; save model.state_dict()")
        holders = [k for k in (*AVERAGED, *_PLAIN) if isinstance(content.get(k), Mapping)]
        if which != "auto" and not entry:
            holders = [k for k, v in content.items() if isinstance(v, Mapping)]
            if which not in holders:
                return _part(content, path, which, [str(k) for k in holders])
            holders.sort(key=lambda k: k != which)
        if not holders:
            break
        entry.append(holders[0])
        others += holders[1:] + [str(k) for k, v in content.items() if k not in holders and _is_state(v)]
        content = content[holders[0]]
    state = {str(k): v.detach() for k, v in content.items() if isinstance(v, Tensor)}
    if not state:
        raise StateError(f"{path} holds no weights {_why_none(content, top=not entry)}")
    return state, ".".join(entry), tuple(others)


def _part(
    content: Mapping[Any, Any], path: Path, which: str, holders: Sequence[str]
) -> tuple[dict[str, Tensor], str, tuple[str, ...]]:
    """Of the model that auto finds, the tensors whose names begin with `which`."""
    names: set[str] = set()
    with suppress(StateError):  # in a file without weights it is as unknown
        state, entry, others = _unwrap(content, path, "auto")
        if part := under(state, which):
            return part, ".".join(filter(None, (entry, which))), others
        names = {name.split(".")[0] for name in state if "." in name}
    raise ConfigError(unknown(f"entry of {path}:", which, holders or names))


def _is_state(value: Any) -> bool:
    """Whether this could be the weights of a model: of an entry that no list here knows."""
    return isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values())


def _why_none(content: Mapping[Any, Any], *, top: bool) -> str:
    """What there is instead of tensors, and the cure."""
    cure = "give the file with the model's state dict"
    if "param_groups" in content:
        return f"(it is the state of an optimizer); {cure}"
    unnamed = [str(k) for k, v in content.items() if _is_state(v)] if top else []
    if unnamed:
        return f"under a name that is known; other entries look like some: {told_parts(unnamed)}"
    return f"(its entries: {_some(content)}); {cure}"


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor."""
    return {k: tuple(v.shape) for k, v in state.items()}


def fit(
    state: Mapping[str, Tensor], expected: Shapes, *, what: str, theirs: Callable[[str], str] = str, unused: str = ""
) -> dict[str, Tensor]:
    """The tensors a network expects, each taken from the name `theirs` gives for it.

    Names that match the pattern `unused` are left out. ConfigError lists what is missing, extra or misshapen.
    """
    wanted = {name: theirs(name) for name in expected}
    known = set(wanted.values())
    missing = [k for k in wanted.values() if k not in state and not k.endswith(_BATCH_COUNTER)]
    surplus = [k for k in state if k not in known and not k.endswith(_BATCH_COUNTER)]
    odd = [
        f"{k} is {list(state[k].shape)}, not {list(expected[name])}"
        for name, k in wanted.items()
        if k in state and tuple(state[k].shape) != tuple(expected[name])
    ]
    extra = [k for k in surplus if not (unused and re.match(unused, k))]
    found = {"missing": missing, "extra": extra, "misshapen": odd}
    if any(found.values()):
        faults = tuple(f"{kind} ({len(names)}): {_some(names)}" for kind, names in found.items() if names)
        raise ConfigError(
            f"the weights do not fit {what}; name the network they belong to (--model, model.name)", faults
        )
    # Files of old versions of torch lack BatchNorm's counters.
    return {name: state[k] if k in state else torch.zeros((), dtype=torch.int64) for name, k in wanted.items()}


def fits(state: Mapping[str, Tensor], expected: Shapes) -> bool:
    """Whether these are the tensors a network expects."""
    try:
        fit(state, expected, what="it")
    except ConfigError:
        return False
    return True


def _some(names: Any) -> str:
    shown = [str(n) for n in names]
    rest = len(shown) - _SHOWN
    return "; ".join(shown[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
