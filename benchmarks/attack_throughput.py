"""How many images per second a PGD-20 evaluation gets through, beside torchattacks and foolbox.

    python benchmarks/attack_throughput.py --out benchmarks/attack_throughput.json
    python benchmarks/attack_throughput.py --run runs/digits_at --run runs/digits_standard

Every contestant answers the same question (the robust accuracy of one model on one test set under Linf PGD with the
same radius, step size, number of steps and batch size) in one process, in turn, several times. Without --run two
small networks are trained first, one adversarially and one not: how much stopping early saves depends on the model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchattacks
from foolbox.attacks import LinfPGD
from foolbox.models.pytorch import PyTorchModel
from torch import Tensor, nn

from flatrock.attacks.catalog import attack
from flatrock.attacks.craft import craft
from flatrock.attacks.gradient import GradientAttack
from flatrock.core.files import write_atomic
from flatrock.core.numbers import number
from flatrock.core.provenance import birth_certificate
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import Linf
from flatrock.data.catalog import load_data
from flatrock.data.dataset import Dataset
from flatrock.evaluation.evaluate import evaluate
from flatrock.models.catalog import create_model
from flatrock.recipes.load import load_recipe
from flatrock.recipes.restore import load


@dataclass(frozen=True)
class Setting:
    """What every contestant is given."""

    eps: float
    step_size: float
    steps: int
    batch_size: int
    seed: int


@dataclass(frozen=True)
class Subject:
    """A model and the data it is judged on."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor


# The contestants: robust accuracy of a subject under a setting

Contestant = Callable[[Subject, Setting], float]


def flatrock_evaluate(subject: Subject, setting: Setting) -> float:
    """flatrock.evaluate: a clean pass, then PGD on the samples that are right; a sample broken on the way leaves the
    batch at once; a last pass over what the attack returned gives the verdict."""
    spec = {"name": "pgd", "steps": setting.steps, "step_size": setting.step_size}
    threat, size, seed = Linf(setting.eps), setting.batch_size, setting.seed
    return evaluate(subject.model, subject.x, subject.y, threat, attacks=[spec], batch_size=size, seed=seed).robust


def flatrock_attack(subject: Subject, setting: Setting) -> float:
    """flatrock.attack on every sample without stopping early, then one pass to count: the work the peers do."""
    threat = Linf(setting.eps)

    def perturb(x: Tensor, y: Tensor) -> Tensor:
        options = {"steps": setting.steps, "step_size": setting.step_size}
        return attack("pgd", subject.model, x, y, threat, seed=setting.seed, **options)

    return _share_right(subject, setting, perturb)


def torchattacks_pgd(subject: Subject, setting: Setting) -> float:
    """torchattacks.PGD on every sample, then one pass to count."""
    peer = torchattacks.PGD(subject.model, eps=setting.eps, alpha=setting.step_size, steps=setting.steps)
    return _share_right(subject, setting, peer)


def foolbox_pgd(subject: Subject, setting: Setting) -> float:
    """foolbox LinfPGD on every sample; it makes the counting pass itself."""
    device = str(subject.x.device)
    model = PyTorchModel(subject.model, bounds=(0, 1), device=device)
    peer = LinfPGD(abs_stepsize=setting.step_size, steps=setting.steps, random_start=True)
    right = 0
    for x, y in _batches(subject, setting):
        _, _, broken = peer(model, x, y, epsilons=setting.eps)
        right += int((~broken).sum())
    return right / len(subject.y)


CONTESTANTS: dict[str, Contestant] = {
    "flatrock evaluate": flatrock_evaluate,
    "flatrock attack": flatrock_attack,
    "torchattacks PGD": torchattacks_pgd,
    "foolbox LinfPGD": foolbox_pgd,
}
BASELINE = "torchattacks PGD"


def _batches(subject: Subject, setting: Setting) -> list[tuple[Tensor, Tensor]]:
    size = setting.batch_size
    return list(zip(torch.split(subject.x, size), torch.split(subject.y, size), strict=True))


def _share_right(subject: Subject, setting: Setting, perturb: Callable[[Tensor, Tensor], Tensor]) -> float:
    right = 0
    for x, y in _batches(subject, setting):
        x_adv = perturb(x, y)
        with torch.no_grad():
            right += int((subject.model(x_adv).argmax(1) == y).sum())
    return right / len(subject.y)


# The subjects


def trained_here(setting: Setting, device: torch.device, *, epochs: int) -> list[Subject]:
    """Two digits networks of the same make: one trained on PGD-7 examples, one on the images as they are."""
    data, test = load_data("digits", "train"), load_data("digits", "test")
    made = []
    for name, adversarial in (("adversarially trained", True), ("standard", False)):
        model = create_model("digits_cnn", seed=setting.seed).to(device)
        _train(model, data.to(device), setting, epochs=epochs, adversarial=adversarial)
        made.append(_subject(name, model, test, device))
    return made


def _train(model: nn.Module, data: Dataset, setting: Setting, *, epochs: int, adversarial: bool) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    inner, threat = GradientAttack(steps=7), Linf(setting.eps)
    for epoch in range(epochs):
        for rows in torch.split(Seed(setting.seed).child("epoch", epoch).permutation(len(data)), 128):
            x, y = data.images(rows), data.y[rows]
            if adversarial:
                x = craft(inner, model.eval(), x, y, threat, Seed(setting.seed).child("train", epoch).samples(rows))
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model.train()(x), y))
            optimizer.step()


def from_run(folder: Path, device: torch.device) -> Subject:
    """The best checkpoint of a run, on the test set of its recipe."""
    data = load_recipe(folder / "recipe.yaml").data
    return _subject(folder.name, load(folder, device=device), load_data(data.name, "test", **data.options), device)


def _subject(name: str, model: nn.Module, test: Dataset, device: torch.device) -> Subject:
    x = test.images(torch.arange(len(test)))
    return Subject(name, model.to(device).eval(), x.to(device), test.y.to(device))


# Measuring


def timed(contestant: Contestant, subject: Subject, setting: Setting) -> tuple[float, float]:
    """Seconds for the whole test set, and the robust accuracy found. The peers draw from torch's global generator."""
    with kept_global_rng(subject.x.device, seed=Seed(setting.seed).child("peers")):
        _wait(subject.x.device)
        begun = time.perf_counter()
        robust = contestant(subject, setting)
        _wait(subject.x.device)
        return time.perf_counter() - begun, robust


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(subject: Subject, setting: Setting, *, repeats: int) -> dict[str, Any]:
    """All contestants in turn, `repeats` times after one round that is not counted; each round starts one later."""
    names = list(CONTESTANTS)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    robust: dict[str, float] = {}
    for turn in range(-1, repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            spent, robust[name] = timed(CONTESTANTS[name], subject, setting)
            if turn >= 0:
                seconds[name].append(spent)
    with torch.no_grad():
        clean = float((subject.model(subject.x).argmax(1) == subject.y).double().mean())
    return {
        "images": len(subject.y),
        "clean_accuracy": clean,
        "contestants": {
            name: {
                "images_per_second": len(subject.y) / statistics.median(spent),
                "times_torchattacks": statistics.median(b / s for b, s in zip(seconds[BASELINE], spent, strict=True)),
                "robust_accuracy": robust[name],
                "seconds": spent,
            }
            for name, spent in seconds.items()
        },
    }


def report(setting: Setting, found: dict[str, dict[str, Any]], device: torch.device, repeats: int) -> dict[str, Any]:
    """The measurement with all that is needed to judge it."""
    packages = {name: importlib.metadata.version(name) for name in ("torchattacks", "foolbox", "numpy")}
    return {
        "schema": "flatrock.benchmark.attack_throughput/1",
        "question": "robust accuracy of a model on its test set under Linf PGD with random start",
        "setting": vars(setting),
        "repeats": repeats,
        "images_per_second": "images / median seconds; contestants take turns in one process, one round not counted",
        "times_torchattacks": "median over rounds of torchattacks' seconds / own seconds in the same round",
        "what_each_does": {name: " ".join((run.__doc__ or "").split()) for name, run in CONTESTANTS.items()},
        "models": found,
        "provenance": birth_certificate(device=device, seed=setting.seed, packages=packages, cpus=os.cpu_count()),
    }


def show(found: dict[str, dict[str, Any]]) -> None:
    """A table per model."""
    for name, result in found.items():
        print(f"\n{name}: {result['images']} images, clean accuracy {100 * result['clean_accuracy']:.1f}%")
        print(f"  {'':20} {'images/s':>10} {'slowest':>10} {'fastest':>10} {'x torchattacks':>15} {'robust %':>9}")
        for who, row in result["contestants"].items():
            slow, fast = (result["images"] / pick(row["seconds"]) for pick in (max, min))
            cells = f"{row['images_per_second']:>10.0f} {slow:>10.0f} {fast:>10.0f} {row['times_torchattacks']:>15.2f}"
            print(f"  {who:20} {cells} {100 * row['robust_accuracy']:>9.1f}")


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, action="append", help="run folder to measure (may be repeated)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--eps", type=number, default=0.2, help="radius (default 0.2, the digits recipes')")
    parser.add_argument("--step-size", type=number, default=0.05)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=15, help="of the networks trained here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, show, and write where asked."""
    options = parse(words)
    warnings.filterwarnings("ignore", module="foolbox")
    device = torch.device(options.device)
    setting = Setting(options.eps, options.step_size, options.steps, options.batch_size, options.seed)
    if options.run:
        subjects = [from_run(folder, device) for folder in options.run]
    else:
        subjects = trained_here(setting, device, epochs=options.epochs)
    found = {subject.name: compare(subject, setting, repeats=options.repeats) for subject in subjects}
    show(found)
    if options.out:
        text = json.dumps(report(setting, found, device, options.repeats), indent=2)
        write_atomic(options.out, text.encode())
        print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
