"""Where a GPU spends a training step: kernels by what they do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import torch

# What the name of a kernel tells, the first that fits; names are those of cuDNN, cuBLAS, Triton and torch.
KINDS = {
    # First: the compiler names what it fuses, casts and neighbours included; `le` and `where` mask behind a ReLU.
    "normalisation and ReLU": (
        r"batch_?norm|bn_(fw|bw)|moments|^_(forward|backward|merge_grads)$|^triton.*(relu|_le_.*where)"
    ),
    "convolutions": r"^(?!triton).*(conv|fprop|dgrad|wgrad|implicit_gemm|cudnn|nhwc)",
    "matrix products": r"^(?!triton).*(gemm|gemv|cutlass|cublas|nvjet)",
    "copies": r"^memcpy|^memset|copy",
    "other": r"",
}
# Not kernels but what a profiler draws around them.
AROUND = re.compile(r"^(##|aten::|Optimizer\.|ProfilerStep|Torch-Compiled|cuda)")


def kind_of(kernel: str) -> str:
    """One of KINDS."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE))


def kernel_ms(run: Callable[[], object], *, steps: int) -> dict[str, float]:
    """Milliseconds per step a GPU spends on each kind of kernel while `run` makes so many steps; empty if unseen."""
    from torch.profiler import ProfilerActivity, profile

    with profile(acc_events=True, activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    for event in seen.events() or ():
        if event.device_type.name == "CUDA" and not AROUND.search(event.name):
            spent[kind_of(event.name)] += event.time_range.elapsed_us()
    return {kind: spent[kind] / 1000 / steps for kind in KINDS} if spent else {}
