"""AutoAttack beside the official implementation (pyautoattack): same model, same images, verdicts and times.

    python benchmarks/autoattack_peer.py --run runs/digits_at --run runs/digits_standard --images 200
    python benchmarks/autoattack_peer.py --run runs/cifar10_at_fast --images 10000 --images 1000 --device cuda \
        --out peer.json

Both run the standard plan, one after the other in one process. Times are wall clock, ours with everything in it
(half-precision twin, checks, verdicts). The peer runs at its usual batch size of 250. The file is written anew after
each comparison.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pyautoattack
import torch
from torch import Tensor, nn

from flatrock.cli.console import say
from flatrock.core.device import pick_device
from flatrock.core.files import write_atomic
from flatrock.core.provenance import birth_certificate
from flatrock.core.records import Result
from flatrock.core.threat import Threat
from flatrock.data.catalog import load_data
from flatrock.data.split import fair_subset
from flatrock.evaluation.evaluate import evaluate
from flatrock.recipes.build import build_threat
from flatrock.recipes.restore import open_checkpoint, restored

ORDER = ("apgd-ce", "apgd-t", "fab-t", "square")


class _Log(logging.Handler):
    """The accuracy and the seconds the peer reports after each attack."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, dict[str, float]] = {}
        self._before = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"after ([\w-]+): ([\d.]+)% \(total time ([\d.]+) s\)", record.getMessage())
        if found:
            total = float(found[3])
            self.rows[found[1].lower()] = {"accuracy": float(found[2]) / 100, "seconds": total - self._before}
            self._before = total
            say(f"  pyautoattack after {total:.0f} s: {found[1]} {found[2]} %")


def peer(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, device: torch.device, seed: int) -> dict[str, Any]:
    """The official plan; flags come from a float32 pass over what it returns."""
    log = _Log()
    logger = logging.getLogger("auto-attack")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(log)
    logger.propagate = False
    norm = {"linf": "Linf", "l2": "L2"}[threat.norm]
    attack = pyautoattack.AutoAttack(model, eps=threat.eps, norm=norm, device=device, seed=seed)
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x_adv, _ = attack.run_standard_evaluation(x, y, batch_size=250)
    _wait(device)
    seconds = time.perf_counter() - begun
    logger.removeHandler(log)
    with torch.no_grad():
        parts = [model(b.to(device)).argmax(1).cpu() for b in torch.split(x_adv, 500)]
    right = torch.cat(parts) == y.cpu()
    return {"seconds": seconds, "robust": float(right.double().mean()), "stages": log.rows, "right": right}


def ours(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, device: torch.device, seed: int, precision: str
) -> tuple[dict[str, Any], Result]:
    """flatrock's plan of the same name."""
    begun = time.perf_counter()
    result = evaluate(model, x, y, threat, attacks=["autoattack"], device=device, seed=seed, precision=precision)
    _wait(device)
    seconds = time.perf_counter() - begun
    stages = {
        label.rpartition("/")[2]: {"accuracy": result.after[label], **cost} for label, cost in result.costs.items()
    }
    found = {"seconds": seconds, "clean": result.clean, "robust": result.robust, "stages": stages}
    return {**found, "findings": [str(f) for f in result.findings], "precision": result.provenance["precision"]}, result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(run: Path, images: int | None, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Both on one run; printed as they come."""
    path, tensors, meta = open_checkpoint(run)
    model, recipe = restored(path, tensors, meta)
    whole = load_data(recipe.data.name, "test", folder=options.data_dir, **recipe.data.options)
    data = fair_subset(whole, images)
    x, y = data.images(torch.arange(len(data))), data.y
    threat = build_threat(recipe)
    model = model.to(device).eval()
    mine, result = ours(model, x, y, threat, device, options.seed, options.precision)
    say(f"{run.name}: {len(data)} images, clean {100 * mine['clean']:.2f}, flatrock {mine['seconds']:.1f} s")
    theirs = peer(model, x.to(device), y.to(device), threat, device, options.seed)
    right = theirs.pop("right")
    for name in ORDER:
        a, b = mine["stages"].get(name), theirs["stages"].get(name)
        told = [f"{100 * s['accuracy']:6.2f} {s['seconds']:8.1f} s" if s else "      -" for s in (a, b)]
        say(f"  {name:<8} flatrock {told[0]}   pyautoattack {told[1]}")
    gap, speedup = 100 * (mine["robust"] - theirs["robust"]), theirs["seconds"] / mine["seconds"]
    say(
        f"  robust   flatrock {100 * mine['robust']:.2f}, pyautoattack {100 * theirs['robust']:.2f} ({gap:+.2f} points)"
    )
    say(f"  time     {theirs['seconds']:.1f} s / {mine['seconds']:.1f} s = {speedup:.1f} times")
    both = result.worst == right
    return {
        "recipe": recipe.name,
        "images": len(data),
        "threat": [threat.norm, threat.eps],
        "flatrock": mine,
        "pyautoattack": theirs,
        "difference_points": gap,
        "speedup": speedup,
        "same_verdict": float(both.double().mean()),
    }


def main() -> None:
    """Compare on every run given, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, action="append", required=True)
    parser.add_argument("--images", type=int, action="append")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = pick_device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    certificate = birth_certificate(device=device, seed=options.seed, command="benchmarks/autoattack_peer.py")
    found: dict[str, Any] = {}
    for run, images in itertools.product(options.run, options.images or [None]):
        found[run.name if images is None else f"{run.name}, {images} images"] = compare(run, images, options, device)
        if options.out:
            content = json.dumps({"runs": found, "provenance": certificate}, indent=1) + "\n"
            write_atomic(options.out, content.encode())


if __name__ == "__main__":
    main()
