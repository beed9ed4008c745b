"""Who stores checkpoints and records: the training process itself, or beside a GPU a thread, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from flatrock.core.tensorfile import save


class Writer:
    """Stores one thing after the other, in the order given.

    `beside` training: digests and disks take longer than many steps, so a thread does it, with what the tensors hold
    when they are given. After something failed nothing more is stored: what comes later counts on what came before.
    The next call raises what failed; if something else has ended training by then, `say` tells.
    """

    def __init__(self, *, beside: bool, say: Callable[[str], None] | None = None) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoints") if beside else None
        self._say = say
        self._last: Future[None] | None = None
        self._error: Exception | None = None

    def save(
        self, path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, older: Path | None = None
    ) -> None:
        """`tensorfile.save`."""
        if self._thread is not None:  # the next step changes them
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self.do(lambda: save(path, tensors, meta, older=older))

    def do(self, work: Callable[[], None]) -> None:
        """Work that comes after everything given before."""
        if self._thread is None:
            work()
            return
        self._check()
        self._last = self._thread.submit(self._guarded, work)

    def wait(self) -> None:
        """Until everything given is done."""
        if self._last is not None:
            self._last.result()
        self._check()

    def _guarded(self, work: Callable[[], None]) -> None:
        if self._error is None:
            try:
                work()
            except Exception as error:  # told by the next call, in the thread that trains
                self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish what was begun; an error from inside is not hidden by one of a disk."""
        if self._thread is not None:
            self._thread.shutdown()
        if error is None:
            self._check()
        elif self._error is not None and self._error is not error and self._say is not None:
            self._say(f"since the last checkpoint nothing was stored: {self._error}")
