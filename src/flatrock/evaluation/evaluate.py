"""Evaluate a model under a list of attacks: flags per sample, findings, costs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.attacks.catalog import parse_attack
from flatrock.attacks.craft import check_inputs, check_logits, craft
from flatrock.core.borrow import borrowed
from flatrock.core.errors import ConfigError, ThreatError
from flatrock.core.progress import Progress, Silent
from flatrock.core.provenance import birth_certificate
from flatrock.core.records import Finding, Result
from flatrock.core.rng import Seed
from flatrock.core.threat import Threat
from flatrock.core.types import Attack
from flatrock.evaluation.checks import check_marks, check_mode, check_probabilities

DEFAULT_ATTACKS = ("pgd-20", "cw-20")


def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    attacks: Sequence[str | Mapping[str, Any]] = DEFAULT_ATTACKS,
    device: torch.device | str | None = None,
    batch_size: int = 256,
    seed: int = 0,
    progress: Progress | None = None,
    marks: tuple[str, ...] = (),
    provenance: Mapping[str, Any] | None = None,
) -> Result:
    """Accuracy of any module that maps [0, 1] inputs to logits, clean and under each attack on its own.

    An attack is tried on every sample the model gets right; a sample it breaks leaves the batch at once. The
    verdict is a separate float32 pass over what the attack returned. `Result.robust` counts the samples that
    survive every attack named.
    """
    plan = make_plan(attacks)
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
    if x.shape[0] == 0:
        raise ThreatError("there is nothing to evaluate: x has no samples")
    check_inputs(x, y, threat)
    where = _home(model) if device is None else torch.device(device)
    listener = progress or Silent()
    findings = check_mode(model) + check_marks(marks)
    with _placed(model, where), borrowed(model, where):
        clean, doubts = _clean_flags(model, x, y, where, batch_size)
        flags, costs = {"clean": clean}, {}
        candidates = clean.nonzero().squeeze(1)
        listener.begin("evaluating", len(plan) * len(candidates))
        for label, attack in plan.items():
            begun = time.perf_counter()
            gen_seed = Seed(seed).child("evaluate", label)
            flag = clean.clone()
            for rows in torch.split(candidates, batch_size) if len(candidates) else ():
                flag[rows] = _survives(attack, model, x[rows].to(where), y[rows].to(where), threat, gen_seed, rows)
                listener.advance(len(rows), label)
            flags[label] = flag
            costs[label] = {"seconds": time.perf_counter() - begun, "samples": float(len(candidates))}
        listener.end()
    return Result(
        threat={"norm": threat.norm, "eps": threat.eps},
        flags=flags,
        findings=tuple(findings + doubts),
        costs=costs,
        marks=marks,
        provenance={**birth_certificate(device=where, seed=seed, batch_size=batch_size), **(provenance or {})},
    )


def make_plan(attacks: Sequence[str | Mapping[str, Any]]) -> dict[str, Attack]:
    """Labels and configured attacks; every fault in the list is reported at once."""
    if isinstance(attacks, str):
        attacks = [attacks]
    plan: dict[str, Attack] = {}
    faults = []
    for spec in attacks:
        try:
            label, attack = parse_attack(spec)
        except ConfigError as error:
            faults.append(" ".join([f"{spec!r}:", str(error.args[0]).replace("\n  - ", " ")]))
            continue
        if label in plan or label == "clean":
            faults.append(f"attack label {label!r} is taken; give one of the two a 'label' of its own")
        plan[label] = attack
    if not attacks:
        faults.append("none is named, so nothing would be robustness; name at least one, for example pgd-20")
    if faults:
        raise ConfigError("attacks:", tuple(faults))
    return plan


def _clean_flags(
    model: nn.Module, x: Tensor, y: Tensor, device: torch.device, batch_size: int
) -> tuple[Tensor, list[Finding]]:
    """Which samples are right unperturbed, and whether the outputs look like probabilities."""
    flags, probable = [], True
    doubts: list[Finding] = []
    for rows in torch.split(torch.arange(x.shape[0]), batch_size):
        at, label = x[rows].to(device), y[rows].to(device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            logits = model(at)
        check_logits(logits, at, label)
        doubts = check_probabilities(logits) if probable else []
        probable = bool(doubts)
        flags.append((logits.argmax(1) == label).cpu())
    return torch.cat(flags), doubts


def _survives(
    attack: Attack, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, seed: Seed, rows: Tensor
) -> Tensor:
    """Whether each sample is still right after the attack, judged in full precision."""
    x_adv = craft(attack, model, x, y, threat, seed.samples(rows.to(x.device)), early_stop=True)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        right: Tensor = model(x_adv).argmax(1) == y
    return right.cpu()


def _home(model: nn.Module) -> torch.device:
    """The device the model lives on (the CPU for a model without tensors)."""
    tensor = next(iter(model.parameters()), next(iter(model.buffers()), None))
    return torch.device("cpu") if tensor is None else tensor.device


@contextmanager
def _placed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Lend the model to another device and bring it home."""
    home = _home(model)
    try:
        model.to(device)
        yield
    finally:
        model.to(home)
