"""The rows of TrH's tables, written down a second time: keys a row changes of an older recipe, and its figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Options = dict[str, Any]
# Base, keys, figures: what `recipe_table_cases.Row` holds.
Made = tuple[str, Options, str]

METHODS = ("", "swa", "s2o", "awp", "trh")
OBJECTIVES: dict[str, Options] = {"at": {"name": "at"}, "trades": {"name": "trades", "beta": 6}}
S2O = {"at": 0.1, "trades": 0.3}
# Tables 5 and 6, by objective: the budget of AWP, and weight and schedule of TrH.
VIT_L = {
    "cifar10": {"at": (5e-4, 1e-5, "multistep"), "trades": (5e-4, 1e-4, "multistep")},
    "cifar100": {"at": (5e-4, 1e-2, "multistep"), "trades": (1e-4, 1e-4, "constant")},
    "linf": {"at": (1e-4, 5e-4, "multistep"), "trades": (1e-4, 5e-4, "multistep")},
    "l2": {"at": (1e-4, 5e-4, "linear"), "trades": (1e-4, 5e-5, "multistep")},
}
HYBRID = {"at": (5e-4, 5e-4, "multistep"), "trades": (5e-4, 1e-4, "multistep")}
GAMMA = {"cifar10": 1e-3, "cifar100": 1e-3, "imagenet": 1e-4}
L2: Options = {"threat": {"norm": "l2", "eps": 3}, "attack.step_size": 1}

SEVEN = {
    "cifar10": {
        "at": "87.5 60.3|86.9 60.4|86.8 60.4|87.3 61.3|88.4 61.5",
        "trades": "85.4 60.8|85.6 60.6|85.9 61.1|84.7 60.1|85.8 61.1",
    },
    "cifar100": {
        "at": "60.0 30.4|64.1 33.7|63.2 31.5|61.5 32.2|65.0 33.0",
        "trades": "58.6 30.5|62.7 33.0|63.5 31.5|60.8 32.2|63.8 33.0",
    },
}
EIGHT = {
    "linf": {
        "at": "72.6 40.7|72.7 40.4|72.8 43.6|67.7 39.4|75.0 46.2",
        "trades": "79.5 37.6|72.9 40.9|73.8 41.3|66.4 38.8|75.9 45.7",
    },
    "l2": {
        "at": "72.2 40.6|72.7 40.5|72.3 40.9|67.9 40.3|74.4 45.9",
        "trades": "78.0 38.6|71.3 40.8|72.2 41.2|65.3 40.9|73.3 45.6",
    },
}


def keys(data: str, objective: str, method: str, values: tuple[float, float, str], **others: Any) -> Options:
    """What makes a row of `DATA_at_trh_vit_b`; only rows without TrH have the paper's l2_reg (0 on CIFAR)."""
    budget, weight, schedule = values
    trace = {"name": "trh", "weight": weight, "schedule": schedule, "gamma": GAMMA[data]}
    flatness: dict[str, list[Options]] = {
        "": [],
        "swa": [{"name": "swa", "decay": 0.995}],
        "s2o": [{"name": "s2o", "weight": S2O[objective]}],
        "awp": [{"name": "awp", "gamma": budget}],
        "trh": [{**trace, "clean": "stop"} if objective == "trades" else trace],
    }
    decay = 1e-4 if data == "imagenet" and method != "trh" else 0
    made = {"objective": OBJECTIVES[objective], "flatness": flatness[method], "optimizer.weight_decay": decay}
    return made | ({"data.name": data} if data == "cifar100" else {}) | others


def name(*parts: str) -> str:
    return "_".join(part for part in parts if part)


def table5() -> Iterator[tuple[str, Made]]:
    """What has a value of its own on CIFAR."""
    for network, model in (("vit_l", "vit_l4"), ("hybrid_l", "hybrid_l16")):
        for data in SEVEN:
            for objective in OBJECTIVES:
                values = VIT_L[data][objective] if network == "vit_l" else HYBRID[objective]
                for method in ("awp", "trh"):
                    made = keys(data, objective, method, values, **{"model.name": model})
                    yield name(data, objective, method, network), ("cifar10_at_trh_vit_b", made, "")


def table6() -> Iterator[tuple[str, Made]]:
    """And on ImageNet; AWP has the same budget for both networks, TrH of ViT-B16 has recipes of its own."""
    for network, methods in (("vit_b", ("awp",)), ("vit_l", ("awp", "trh"))):
        for norm in EIGHT:
            for objective in OBJECTIVES:
                for method in methods:
                    others = L2 if norm == "l2" else {}
                    others = {**others, "model.name": f"{network}16"}
                    made = keys("imagenet", objective, method, VIT_L[norm][objective], **others)
                    called = name("imagenet", objective, method, network, norm.replace("linf", ""))
                    yield called, ("imagenet_at_trh_vit_b", made, "")


def table7() -> Iterator[tuple[str, Made]]:
    """With the values of ViT-L16; TrH on CIFAR-10 has recipes of its own."""
    for data, columns in SEVEN.items():
        for objective, texts in columns.items():
            for method, figures in zip(METHODS, texts.split("|"), strict=True):
                if (data, method) != ("cifar10", "trh"):
                    made = keys(data, objective, method, VIT_L[data][objective])
                    yield name(data, objective, method, "vit_b"), ("cifar10_at_trh_vit_b", made, figures)


def table8() -> Iterator[tuple[str, Made]]:
    """With the values of ViT-L16."""
    for norm, columns in EIGHT.items():
        for objective, texts in columns.items():
            for method, figures in zip(METHODS, texts.split("|"), strict=True):
                others = {**(L2 if norm == "l2" else {}), "model.name": "hybrid_l16"}
                made = keys("imagenet", objective, method, VIT_L[norm][objective], **others)
                called = name("imagenet", objective, method, "hybrid_l", norm.replace("linf", ""))
                yield called, ("imagenet_at_trh_vit_b", made, figures)
