"""Tensors and what is known about them in one safetensors file (no pickle), written atomically, under a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.core.errors import StateError
from flatrock.core.files import json_text, write_atomic

FORMAT = "flatrock.checkpoint/1"
# How files of torch.save begin: zip archives, as others (.npz) are, and pickles as torch wrote them before 1.6.
_ARCHIVES = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")
_FOREIGN = (
    "weights of other projects are for `flatrock eval --model ... --weights ...` and the like, docs/foreign.md "
    "(in Python: flatrock.workflows.foreign.load_foreign)"
)


def digest(tensors: Mapping[str, Tensor], meta: str) -> str:
    """sha256 over the meta text and every tensor's name, type, shape and bytes."""
    h = hashlib.sha256(meta.encode())
    for name in sorted(tensors):
        t = tensors[name]
        h.update(f"{name}|{t.dtype}|{tuple(t.shape)}|".encode())
        h.update(t.reshape(-1).view(torch.uint8).numpy().data if t.numel() else b"")
    return h.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """sha256 over the names, types, shapes and bytes of all weights and buffers; extra state may be no tensor."""
    return tensors_digest({k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)})


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the names, types, shapes and bytes of tensors, wherever they are."""
    return digest({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, "")


def save(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, older: Path | None = None) -> None:
    """Write tensors and JSON-able meta; the file on disk is the old one or the whole new one."""
    from safetensors.torch import save as to_bytes

    plain = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}
    text = json_text(dict(meta))
    header = {"format": FORMAT, "meta": text, "digest": digest(plain, text)}
    write_atomic(path, to_bytes(plain, metadata=header), older=older)


def load(path: Path, *, role: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and meta of a checkpoint; StateError if it is missing, foreign, truncated, altered or of another role."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise StateError(f"there is no checkpoint {path}")
    try:
        with safe_open(path, framework="pt") as f:
            header = f.metadata() or {}
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if _is_archive(path):
            raise StateError(
                f"{path} is a torch file or another archive, not a flatrock checkpoint; {_FOREIGN}"
            ) from error
        if path.suffix != ".safetensors":
            raise StateError(
                f"{path} is no checkpoint (flatrock's end in .safetensors); name a run folder or a checkpoint in it"
            ) from error
        raise StateError(
            f"{path} is damaged and cannot be read ({error}); use another checkpoint of the run"
        ) from error
    if header.get("format") != FORMAT:
        raise StateError(
            f"{path} is not a flatrock checkpoint (format {header.get('format')!r}, expected {FORMAT!r}); {_FOREIGN}"
        )
    if digest(tensors, header.get("meta", "")) != header.get("digest"):
        raise StateError(f"{path} is damaged (its digest does not match); use another checkpoint of the run")
    meta = dict(json.loads(header["meta"]))
    if role is not None and meta.get("role") != role:
        raise StateError(
            f"{path} holds a {meta.get('role')!r} checkpoint where {role!r} belongs; put the right file back"
        )
    return tensors, meta


def is_checkpoint(path: Path) -> bool:
    """Whether a file says that it is one of these; one that cannot be read does not."""
    return _header(path).get("format") == FORMAT


def role_of(path: Path) -> str | None:
    """What a file of ours says it is for, whatever became of its tensors; None of any other file."""
    header = _header(path)
    return json.loads(header["meta"]).get("role") if header.get("format") == FORMAT else None


def _header(path: Path) -> dict[str, str]:
    """What stands before the tensors; nothing if that cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as f:
            return f.metadata() or {}
    except (SafetensorError, OSError, ValueError, RuntimeError):
        return {}


def _is_archive(path: Path) -> bool:
    try:
        with path.open("rb") as f:
            return f.read(4) in _ARCHIVES
    except OSError:
        return False
