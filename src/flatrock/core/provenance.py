"""The birth certificate of a number: what code, on what machine, from what recipe and seed."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

VERSION = "0.1.0"
# The commit of an installed copy.
NO_COMMIT = "not a checkout"
# When this process began to read the source.
LOADED = time.time()


@cache
def commit() -> str:
    """The git commit of this source tree, or 'not a checkout' for an installed copy.

    '+' marks changes that are not in it: uncommitted ones, and files written since this process read them, which then
    runs something older. FLATROCK_COMMIT, if set, is believed instead: a copy in a container cannot look it up.
    """
    here = Path(__file__).parent
    if told := os.environ.get("FLATROCK_COMMIT"):
        return told
    try:
        top = _git(here, "rev-parse", "--show-toplevel")
        tracked = _git(here, "ls-files", "--error-unmatch", Path(__file__).name)
        if not top or not tracked:
            return NO_COMMIT
        dirty = "+" if _written_since(LOADED) or _git(here, "status", "--porcelain", "--untracked-files=no") else ""
        return _git(here, "rev-parse", "HEAD")[:12] + dirty
    except (OSError, subprocess.SubprocessError):
        return NO_COMMIT


def _written_since(moment: float) -> bool:
    # Not what begins with a dot: editors keep notes of their own there, some of them links to nothing.
    files = [file for file in Path(__file__).parents[1].rglob("*.py") if not file.name.startswith(".")]
    return any(not file.exists() or file.stat().st_mtime > moment for file in files)


def _git(where: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def device_name(device: torch.device | str) -> str:
    """The device in words."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type} ({platform.machine()}, {threads} thread{'' if threads == 1 else 's'})"


def _cuda(device: torch.device | str) -> dict[str, Any]:
    """On a GPU, what else decides its rounding: libraries, and where torch may compute float32 in TF32."""
    if torch.device(device).type != "cuda":
        return {}
    kinds: dict[str, Any] = {"matmul": torch.backends.cuda.matmul, "cudnn": torch.backends.cudnn.conv}  # type: ignore[attr-defined]
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "tf32": {name: kind.fp32_precision == "tf32" for name, kind in kinds.items()},
    }


def devices(certificates: Iterable[Mapping[str, Any]]) -> str:
    """Where things were measured that are shown together, each place once."""
    return " and ".join(dict.fromkeys(str(c["device"]) for c in certificates if c.get("device")))


def birth_certificate(*, device: torch.device | str, seed: int, **more: Any) -> dict[str, Any]:
    """Everything needed to ask the same question again."""
    return {
        "flatrock": VERSION,
        "commit": commit(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": device_name(device),
        **_cuda(device),
        "seed": seed,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **more,
    }


def origin(about: Mapping[str, Any]) -> tuple[str, str]:
    """Whose numbers these are: a run and its checkpoint, or a model that is no run and its weights file, if any."""
    if "model" in about:
        return str(about["model"]), str(about.get("weights") or "")
    file = str(about.get("checkpoint", "?")).removesuffix(".safetensors")
    return str(about.get("run", about.get("recipe", "?"))), file


def checkpoint_of(about: Mapping[str, Any]) -> str:
    """The checkpoint of a run that a result is of: best, last, ..., epoch-0010."""
    return str(about.get("checkpoint")).removesuffix(".safetensors")
