"""The rows of the published tables, written down a second time: an older recipe, keys a row changes, its figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import trh_table_cases as trh

Options = dict[str, Any]


class Row(NamedTuple):
    """A row is the recipe `base` with `keys` changed; its text quotes these figures in this order."""

    base: str
    keys: Options
    figures: str


AWP: Options = {"name": "awp", "gamma": 0.005, "warmup": 10}
AT_AWP: Options = {"name": "awp", "gamma": 0.01, "warmup": 0}
# What the official TRADES script of RAT does; 'code' is its pairing and its weight 1 - eta of cross-entropy.
CODE: Options = {"noise_on": "conv", "second_pair": "code", "ce_weight": "code"}
RAT1: Options = {"name": "rat", "order": 1, "eta": 0.3, "sigma": 1e-4, "second_factor": 0.5, **CODE}
RAT2: Options = {**RAT1, "order": 2, "eta": 0.2}
SILENT: Options = {"sigma": 0}  # the AWP scripts put no noise on weights
RESNET18: Options = {**RAT2, **SILENT, "second_factor": 0.4, "cc": 0.8}
WRN34: Options = {"model.name": "wide_resnet34_10"}
L2_STEP: Options = {"attack.step_size": 2 * 128 / 10 / 255}  # 2 eps/K
WALK: Options = {"name": "langevin", "noise": 1e-3, "start": "corner", "drift": "code", "average": 0.9}


def flat(*methods: Options, **keys: Any) -> Options:
    """The keys of a recipe with these flatness methods."""
    return {"flatness": list(methods), **keys}


def rat_table1() -> Iterator[tuple[str, Row]]:
    """By order and eta."""
    etas = (0.05, 0.1, 0.2, 0.3, 0.4)
    first = "83.19 53.98 52.12 48.2|82.86 54.29 52.24 49.3|83.55 54.86 52.65 48.8|83.96 55.05 52.54 49.7"
    both = "83.25 54.07 51.93 48.4|83.47 54.42 52.28 49.7|84.13 54.91 52.53 50.3|84.27 54.36 51.80 48.9"
    published = {1: f"{first}|83.93 54.65 52.23 48.6".split("|"), 2: f"{both}|84.14 54.38 51.56 49.6".split("|")}
    for order, rows in published.items():
        for eta, figures in zip(etas, rows, strict=True):
            name = f"cifar10_trades_rat{order}_linf_eta{round(100 * eta):03}"
            yield name, Row("cifar10_trades_linf", flat({**RAT2, "order": order, "eta": eta}), figures)


def rat_table2() -> Iterator[tuple[str, Row]]:
    """Six methods on two data sets (TRADES on CIFAR-10 is a recipe of its own), and three rows of other papers."""
    methods = {
        "trades": (),
        "trades_rat1": (RAT1,),
        "trades_rat2": (RAT2,),
        "trades_awp": (AWP,),
        "trades_awp_rat1": (AWP, RAT1 | SILENT),
        "trades_awp_rat2": (AWP, RAT2 | SILENT),
    }
    ten = "85.51 58.34 56.06 54.0|85.98 58.47 56.13 54.2|85.17 59.64 57.33 56.2 85.36 56.17|86.10 61.47 58.09 57.1"
    hundred = "60.22 32.11 28.93 26.9|63.01 33.26 29.44 28.1|62.93 33.36 29.61 27.9|60.38 34.09 30.78 28.6 60.17 28.80"
    figures = {
        "cifar10": ["", *f"{ten}|86.12 61.45 58.22 57.4".split("|")],
        "cifar100": f"{hundred}|63.98 35.36 31.63 29.8|64.71 35.73 31.41 30.2".split("|"),
    }
    for data, rows in figures.items():
        for (method, flatness), text in zip(methods.items(), rows, strict=True):
            if text:
                yield f"{data}_{method}_linf_wrn34", Row(f"{data}_trades_linf", flat(*flatness, **WRN34), text)
    s2o = flat(AWP, {"name": "s2o", "weight": 0.3}, **WRN34)
    yield "cifar10_trades_awp_s2o_linf_wrn34", Row("cifar10_trades_linf", s2o, "86.01 61.12 57.93 55.90")
    mart = {"objective.beta": 6, "optimizer.lr": 0.1, "optimizer.weight_decay": 7e-4, "train.epochs": 90, **WRN34}
    yield "cifar10_mart_linf_wrn34", Row("cifar10_mart_linf", mart, "83.51 58.31 54.33 51.10")
    yield "cifar10_at_linf_wrn34_20", Row("cifar10_at_linf", {"model.name": "wide_resnet34_20"}, "85.34 53.42")


def rat_tables_3_4(norm: str, figures: Mapping[str, tuple[str, str]], keys: Options) -> Iterator[tuple[str, Row]]:
    """TRADES-AWP without and with both terms, on three data sets."""
    for data, (plain, both) in figures.items():
        yield f"{data}_trades_awp_{norm}", Row(f"{data}_trades_{norm}", flat(AWP, **keys), plain)
        yield f"{data}_trades_awp_rat2_{norm}", Row(f"{data}_trades_{norm}", flat(AWP, RESNET18, **keys), both)


TABLE3 = {
    "cifar10": ("87.05 72.08 71.6", "88.41 72.85 72.0"),
    "cifar100": ("62.87 45.11 41.8", "65.59 46.88 42.4"),
    "svhn": ("92.86 72.45 63.8", "93.98 73.07 64.5"),
}
TABLE4 = {
    "cifar10": ("82.78 61.79 59.42", "84.27 62.56 60.58"),
    "cifar100": ("58.33 38.55 36.70", "61.08 39.82 37.84"),
    "svhn": ("93.77 63.80 59.54", "95.11 66.16 63.59"),
}


def rat_table5() -> Iterator[tuple[str, Row]]:
    """Two small networks."""
    published = {
        "vgg16": ("80.99 50.13 47.09 44.4", "78.46 51.19 47.41 46.3", "80.31 52.71 48.38 46.5"),
        "mobilenetv2": ("81.86 53.34 49.93 47.8", "79.86 53.56 50.11 47.7", "81.95 55.37 51.55 49.4"),
    }
    for network, rows in published.items():
        for method, flatness, text in zip(
            ("rat2", "awp", "awp_rat2"), ((RAT2,), (AWP,), (AWP, RAT2 | SILENT)), rows, strict=True
        ):
            name = f"cifar10_trades_{method}_linf_{network}"
            yield name, Row(f"cifar10_trades_linf_{network}", flat(*flatness), text)


def s2o_models() -> Iterator[tuple[str, Row]]:
    """On three objectives; AT is attacked as TRADES is, in eval mode."""
    light, strong = ({"name": "s2o", "weight": w} for w in (0.1, 0.3))
    at = flat(light, objective={"name": "at"})
    yield "cifar10_at_s2o_linf", Row("cifar10_trades_linf", at, "83.65 55.11 48.3")
    yield "cifar10_trades_s2o_linf_wrn34", Row("cifar10_trades_linf", flat(strong, **WRN34), "85.67 58.34 54.1")
    mart = flat(strong, objective={"name": "mart", "beta": 6}, **{"attack.start": "gaussian"}, **WRN34)
    yield "cifar10_mart_s2o_linf_wrn34", Row("cifar10_trades_linf", mart, "83.91 59.29 54.1")


def awp_table3() -> Iterator[tuple[str, Row]]:
    """The released logs have gamma 0.01 throughout, and for SVHN Linf a warm-up of 5 epochs counted from 0."""
    published = {
        "cifar10_at_awp_linf": "55.39 54.73 82.00 81.11",
        "cifar10_at_awp_l2": "72.69 72.08 90.18 89.71 70.31 90.11",
        "cifar100_at_awp_linf": "30.71 30.28 54.19 54.39 25.34 53.81",
        "cifar100_at_awp_l2": "45.60 44.66 65.07 64.40",
        "svhn_at_awp_linf": "59.12 55.87 93.85 92.59",
        "svhn_at_awp_l2": "72.57 67.73 95.95 95.22",
    }
    for name, text in published.items():
        method = {**AT_AWP, "warmup": 6} if name == "svhn_at_awp_linf" else AT_AWP
        yield name, Row(name.replace("_awp", ""), flat(method), text)


def awp_table_4_5(norm: str, published: Mapping[str, str]) -> Iterator[tuple[str, Row]]:
    """Other regularisers."""
    keys: dict[str, Options] = {
        "l1": {"optimizer.l1": 5e-6},
        "l2": {"optimizer.decay_on": "weights", "optimizer.weight_decay": 5e-3},
        "cutout": {"data.augment.cutout": 14},
        "mixup": {"data.augment.mixup": 1.4},
    }
    for name, text in published.items():
        yield f"cifar10_at_{norm}_{name}", Row(f"cifar10_at_{norm}", keys[name], text)


TABLE_4_OF_AWP = {
    "l1": "51.95 48.76 82.77 83.42",
    "l2": "51.60 47.37 81.05 81.97",
    "cutout": "52.78 50.37 80.99 83.46",
    "mixup": "52.87 49.76 78.76 78.50",
}
TABLE_5_OF_AWP = {
    "l1": "67.99 63.75 88.04 88.49",
    "l2": "67.78 63.62 88.57 87.75",
    "cutout": "69.38 67.68 88.36 88.01",
    "mixup": "70.11 68.20 87.29 86.91",
}


def awp_models() -> Iterator[tuple[str, Row]]:
    """Released beside the tables."""
    for name, text in {
        "cifar10_at_awp_linf_wrn34": "85.36 53.97 58.3 85.41",
        "cifar100_at_awp_linf_wrn34": "60.38 28.86",
        "cifar10_at_awp_l2_wrn34": "92.58 72.87",
    }.items():
        base = name.replace("_awp", "").removesuffix("_wrn34")
        yield name, Row(base, flat(AT_AWP, **WRN34), text)
    yield "cifar10_trades_awp_l2_wrn34", Row("cifar10_trades_l2", flat(AWP, **L2_STEP, **WRN34), "88.51 73.66")
    yield "cifar10_mart_awp_linf_wrn34", Row("cifar10_mart_linf_wrn34", flat(AWP), "84.43 54.23")
    rst = {
        "data.extra": {"file": "tiny_images_500k.npz", "fraction": 0.5},
        "model.name": "wide_resnet28_10",
        "threat.eps": 0.031,
        "attack.step_size": 0.007,
        "optimizer.nesterov": True,
        "schedule": {"name": "cosine", "clock": "epoch"},
        "train.batch_size": 256,
    }
    yield "cifar10_rst_awp_linf_wrn28", Row("cifar10_trades_linf", flat(AWP, **rst), "88.25 60.04")


ATENT_L2: Options = {
    "objective": {"name": "at"},
    "model.name": "resnet20",
    "threat": {"norm": "l2", "eps": 1.0},
    "attack": {**WALK, "steps": 10, "step_size": 0.2, "gamma": 0.05, "project": "never", "bn_mode": "train"},
    "optimizer.weight_decay": 1e-4,
    "schedule": {"milestones": [50], "clock": "epoch"},
    "train": {"epochs": 84, "batch_size": 256},
}
ATENT_LINF: Options = {
    "objective": {"name": "at"},
    **WRN34,
    "threat.eps": 0.031,
    "attack": {**WALK, "steps": 10, "step_size": 0.007, "project": "last", "bn_mode": "train"},
    "schedule": {"milestones": [75]},
    "train": {"epochs": 76},
}


def atent_s1() -> Iterator[tuple[str, Row]]:
    """At eps 1; the row with strong noise; a plain row of other authors."""
    yield "cifar10_atent_l2", Row("cifar10_trades_linf", ATENT_L2, "85.44 65.12 0.5 47.38")
    noise = {"threat.eps": 0.435, "attack.step_size": 0.5 * 0.435 / 10, "attack.noise": 0.577}
    yield "cifar10_atent_l2_noise", Row("cifar10_trades_linf", {**ATENT_L2, **noise}, "72.10 64.53 0.435")
    plain = {"model.name": "wide_resnet28_4", "attack": {"name": "pgd", "steps": 10, "step_size": 0.25}}
    yield "cifar10_at_l2_wrn28", Row("cifar10_trades_linf", {**ATENT_L2, **plain}, "83.25 66.69 0.5 46.11")


def atent_s4() -> Iterator[tuple[str, Row]]:
    """Five Langevin steps, and what else was timed."""
    yield "cifar10_atent_linf_wrn34_k5", Row("cifar10_atent_linf_wrn34", {"attack.steps": 5}, "572.85 4.93")
    fewer = {"attack.steps": 5, "attack.step_size": 2 / 5}
    yield "cifar10_atent_l2_k5", Row("cifar10_atent_l2", fewer, "142.47 1.18")
    trades = {
        "objective": {"name": "trades", "beta": 6},
        "optimizer.weight_decay": 2e-4,
        "schedule": {"milestones": [75, 90, 100], "clock": "epoch_from_1"},
        "train": {"epochs": 100, "batch_size": 128},
    }
    pgd = {
        "optimizer.weight_decay": 5e-4,
        "schedule": {"milestones": [50, 100], "clock": "epoch"},
        "train": {"epochs": 150, "batch_size": 128},
    }
    published = {
        "trades_linf_wrn34_100": (trades, "kl-pgd", 0.007, "1577.29 1.45"),
        "at_linf_wrn34_150": (pgd, "pgd", 0.007, "615.48 4.09"),
        "trades_l2_resnet20": (trades, "kl-pgd", 0.2, "2606.43 2.64"),
        "at_l2_resnet20": (pgd, "pgd", 0.2, "241.79 0.79"),
    }
    for name, (keys, attack, step_size, text) in published.items():
        base = "cifar10_atent_l2" if "l2" in name else "cifar10_atent_linf_wrn34"
        attacked = {"attack": {"name": attack, "steps": 10, "step_size": step_size}}
        yield f"cifar10_{name}", Row(base, {**keys, **attacked}, text)


S3 = "79.83 73.35 57.23 39.37 79.95 73.76 59.69 47.53 85.67"
TRACES: dict[str, Options] = {
    "top": {"name": "trh", "weight": 0.5, "layers": "top"},
    "full": {"name": "trh", "weight": 0.05, "layers": "full", "clean": "full", "estimate": "exact"},
}
EXPECTED: dict[str, dict[str, Row]] = {
    "rat_table1": dict(rat_table1()),
    "rat_table2": dict(rat_table2()),
    "rat_table3": dict(rat_tables_3_4("l2", TABLE3, L2_STEP)),
    "rat_table4": dict(rat_tables_3_4("linf", TABLE4, {})),
    "rat_table5": dict(rat_table5()),
    "rat_table8": {"cifar10_at_rat2_linf": Row("cifar10_at_linf", flat(RAT2), "83.56 54.23 52.19 48.7")},
    "s2o_models": dict(s2o_models()),
    "awp_table3": dict(awp_table3()),
    "awp_table4": dict(awp_table_4_5("linf", TABLE_4_OF_AWP)),
    "awp_table5": dict(awp_table_4_5("l2", TABLE_5_OF_AWP)),
    "awp_models": dict(awp_models()),
    "atent_s1": dict(atent_s1()),
    "atent_s3": {"cifar10_atent_linf_wrn34": Row("cifar10_trades_linf", ATENT_LINF, S3)},
    "atent_s4": dict(atent_s4()),
    "trh_moons": {f"moons_at_trh_{k}": Row("moons_at", flat(method), "") for k, method in TRACES.items()},
    "trh_table5": {name: Row(*row) for name, row in trh.table5()},
    "trh_table6": {name: Row(*row) for name, row in trh.table6()},
    "trh_table7": {name: Row(*row) for name, row in trh.table7()},
    "trh_table8": {name: Row(*row) for name, row in trh.table8()},
}

# Rows that have no recipe are named in the header, with their figures.
WITHOUT = {
    "rat_table2": "Lee 92.56/59.75/54.53/39.70|Zhang 2020 84.52/-/-/53.51|Pang 86.43/57.91/-/54.39|"
    "Gowal 85.29/58.22/-/57.20|Cui 60.43/35.50/31.50/29.34|Gowal 60.86/31.47/-/30.03",
    "rat_table8": "82.41, PGD-20 52.77, CW-20 50.43, AutoAttack 47.1|GAT 80.49/53.13/-/47.3|"
    "TRADES + GAT 81.32/53.37/-/49.6|HAT 84.90/49.08/-/-|HAT with DDPM images 86.86/57.09/-/-",
    "awp_table4": "55.39 / 54.73|82.00 / 81.11",
    "awp_table5": "72.69 / 72.08|90.18 / 89.71",
    "awp_models": "88.33, AutoAttack 57.39",
    "atent_s1": "MMA (clean 88.92, PGD-10 66.81 at 0.5, 37.22 at 1)|TRADES smoothing (clean 75.13, PGD-10 61.03|"
    "72.2 at radius 0, 55.41",
    "atent_s4": "282.04 +- 1.65|1128.21 +- 5.29",
    "trh_table7": "(clean 88.4, AutoAttack 61.5)|(clean 85.8, AutoAttack 61.1)",
}
