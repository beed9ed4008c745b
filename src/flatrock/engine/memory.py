"""The memory of a GPU that training takes, probes apart."""

from __future__ import annotations

import gc

import torch
from torch import nn

from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job, ProbeOutcome


def note_memory(job: Job, folder: RunFolder) -> None:
    """Keep the most bytes of the GPU an epoch of training has taken so far."""
    if job.device.type == "cuda":
        taken = torch.cuda.max_memory_reserved(job.device)
        if taken > folder.read_info().get("peak_memory_bytes", 0):
            folder.write_info(peak_memory_bytes=taken)


def probed(job: Job, model: nn.Module) -> ProbeOutcome:
    """What the probe says. On a GPU it takes more memory than a step does; that is given back and not remembered."""
    if job.device.type != "cuda":
        return job.probe(model)
    before = torch.cuda.memory_allocated(job.device)
    outcome = job.probe(model)
    if torch.cuda.memory_allocated(job.device) > before:
        gc.collect()  # copies of a network that holds itself; not always, because beside a compiler it takes long
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(job.device)
    return outcome
