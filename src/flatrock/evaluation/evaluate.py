"""Evaluate a model under a list of attacks: flags per sample, findings, costs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.attacks.catalog import describe, parse_attack
from flatrock.attacks.craft import check_inputs, check_logits, check_model, craft
from flatrock.attacks.pgd import classified_right
from flatrock.core.borrow import borrowed, full_precision
from flatrock.core.device import pick_device
from flatrock.core.errors import ConfigError, ThreatError
from flatrock.core.progress import Progress, Silent
from flatrock.core.provenance import birth_certificate
from flatrock.core.records import Finding, Result
from flatrock.core.rng import Seed
from flatrock.core.threat import Threat
from flatrock.core.types import Attack
from flatrock.evaluation.checks import check_finite, check_marks, check_mode, check_probabilities

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
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size!r}")
    check_inputs(x, y, threat)
    if x.shape[0] == 0:
        raise ThreatError("there is nothing to evaluate: x has no samples")
    check_model(model, x)
    where = _home(model) if device is None else pick_device(device)
    marks = tuple(marks) or tuple(getattr(model, "marks", ()))
    findings = check_mode(model) + check_marks(marks)
    root = Seed(seed)
    exam = _Exam(model, x, y, threat, where, batch_size, root.child("evaluate"))
    with _placed(model, where), borrowed(model, where), full_precision(where):
        predictions, doubts = _predict(exam)
        flags, costs, no_answer = _try_all(exam, plan, predictions == y.cpu(), progress or Silent())
    return Result(
        threat={"norm": threat.norm, "eps": threat.eps},
        flags=flags,
        predictions=predictions,
        attacks={label: describe(attack, threat) for label, attack in plan.items()},
        findings=tuple(findings + doubts + check_finite(no_answer)),
        costs=costs,
        marks=marks,
        provenance={**birth_certificate(device=where, seed=root.key, batch_size=batch_size), **(provenance or {})},
    )


@dataclass(frozen=True)
class _Exam:
    """What is asked of whom, the same for every attack."""

    model: nn.Module
    x: Tensor
    y: Tensor
    threat: Threat
    device: torch.device
    batch_size: int
    seed: Seed

    def batches(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Row numbers (on the CPU), inputs and labels (on the device), a batch at a time."""
        for part in torch.split(rows, self.batch_size) if len(rows) else ():
            yield part, self.x[part.to(self.x.device)].to(self.device), self.y[part.to(self.y.device)].to(self.device)


def _predict(exam: _Exam) -> tuple[Tensor, list[Finding]]:
    """The class given to each unperturbed input, and whether the outputs look like probabilities."""
    predictions: list[Tensor] = []
    doubts: list[Finding] = []
    for rows, x, y in exam.batches(torch.arange(exam.x.shape[0])):
        with torch.no_grad():
            logits = exam.model(x)
        check_logits(logits, x, y)
        doubts = check_probabilities(logits) if doubts or int(rows[0]) == 0 else []
        predictions.append(logits.argmax(1).cpu())
    return torch.cat(predictions), doubts


def _try_all(
    exam: _Exam, plan: Mapping[str, Attack], clean: Tensor, progress: Progress
) -> tuple[dict[str, Tensor], dict[str, dict[str, float]], dict[str, int]]:
    """Every attack on every sample that is right without it: flags, costs, and how many got no finite answer."""
    flags: dict[str, Tensor] = {"clean": clean}
    costs: dict[str, dict[str, float]] = {}
    no_answer: dict[str, int] = {}
    candidates = clean.nonzero().squeeze(1)
    progress.begin("evaluating", len(plan) * len(candidates))
    for label, attack in plan.items():
        begun = time.perf_counter()
        flags[label], no_answer[label] = clean.clone(), 0
        for rows, x, y in exam.batches(candidates):
            gen = exam.seed.child(label).samples(rows.to(exam.device))
            x_adv = craft(attack, exam.model, x, y, exam.threat, gen, early_stop=True)
            with torch.no_grad():
                logits = exam.model(x_adv)
            flags[label][rows] = classified_right(logits, y).cpu()
            no_answer[label] += int((~torch.isfinite(logits).all(1)).sum())
            progress.advance(len(rows), label)
        costs[label] = {"seconds": time.perf_counter() - begun, "samples": float(len(candidates))}
    progress.end()
    return flags, costs, no_answer


def make_plan(attacks: Sequence[str | Mapping[str, Any]]) -> dict[str, Attack]:
    """Labels and configured attacks; every fault in the list is reported at once."""
    if isinstance(attacks, str | Mapping):
        attacks = [attacks]
    if not isinstance(attacks, Sequence):
        raise ConfigError(f"attacks must be a list of names such as ['pgd-20', 'cw-20'], got {attacks!r}")
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
