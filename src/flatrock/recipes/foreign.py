"""Models that flatrock did not train, evaluated like a run: options -> model, test set, result, file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.attacks.craft import check_model
from flatrock.core.borrow import borrowed
from flatrock.core.device import pick_device
from flatrock.core.errors import ConfigError, FlatrockError, ModelError, StateError
from flatrock.core.files import brief, write_atomic
from flatrock.core.numbers import number
from flatrock.core.options import choose
from flatrock.core.progress import Progress, Silent
from flatrock.core.records import Result
from flatrock.core.registry import unknown
from flatrock.core.tensorfile import save
from flatrock.core.threat import THREATS, Threat
from flatrock.data.catalog import DATA, load_data
from flatrock.data.dataset import Dataset
from flatrock.data.split import fair_subset, places
from flatrock.evaluation.evaluate import DEFAULT_ATTACKS, PRECISIONS, evaluate
from flatrock.evaluation.exam import placed
from flatrock.evaluation.journal import discard
from flatrock.evaluation.plans import make_plan
from flatrock.models.catalog import NORMALIZATIONS
from flatrock.models.convert import Normalized
from flatrock.models.foreign import Foreign, model_faults, open_foreign
from flatrock.recipes.evaluate import adversarial_file
from flatrock.recipes.restore import Source
from flatrock.recipes.surrogate import open_surrogate, surrogate_mark, unheeded

Attacks = Sequence[str | Mapping[str, Any]]
# Samples on which other normalisations are tried, and how much one must gain to ask for a decision.
_TRIED, _GAIN, _LEAST = 200, 0.1, 10


def load_foreign(
    model: str | None = None,
    *,
    weights: Path | str | None = None,
    num_classes: int | None = None,
    normalize: str | None = None,
    which: str = "auto",
) -> nn.Module:
    """A network for inputs in [0, 1] that flatrock did not train, in eval mode.

    `model` is a name of flatrock's, `package.module:factory`, or None where the weights are of a family that `convert`
    knows. `weights` is a safetensors file or a torch file (no pickle is executed); without it a factory's own are kept.
    `num_classes` is checked against the weights. `normalize` is a name of NORMALIZATIONS or 'none'; None takes what the
    file stores. `which` names the entry of a checkpoint that holds several models; auto prefers averaged weights.
    """
    return open_foreign(model, weights=weights, num_classes=num_classes, normalize=normalize, which=which).model


def evaluate_foreign(
    model: str | None = None,
    *,
    data: str | None = None,
    norm: str | None = None,
    eps: float | str | None = None,
    weights: Path | str | None = None,
    num_classes: int | None = None,
    normalize: str | None = None,
    which: str = "auto",
    attacks: Attacks | None = None,
    surrogate: Source | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    precision: str = "auto",
    doubt: bool = False,
    keep_adversarial: bool = False,
    out: Path | None = None,
    journal: bool = False,
    resume: bool = False,
    data_folder: Path | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
    on_data: Callable[[Dataset], None] = unheeded,
) -> Result:
    """Evaluate a network that flatrock did not train (see load_foreign) on a test set; every fault is listed at once.

    `journal` keeps finished batches beside `out` until `store_foreign`; the other options are those of evaluate_run.
    """
    chosen = DEFAULT_ATTACKS if attacks is None else attacks
    made: dict[str, Any] = {"weights": weights, "num_classes": num_classes, "normalize": normalize}
    asked = _faults(data, norm, eps, chosen, surrogate is not None, precision, device, out)
    foreign = _opened(model, made, which, asked, progress or Silent())
    test, whole = _test_set(foreign, str(data), limit, data_folder, pick_device(device), num_classes)
    on_data(test)
    other = open_surrogate(surrogate, test)
    chosen = other.attacks(chosen, chosen)
    threat = THREATS[str(norm)](number(eps))
    about = {**foreign.about, **_data_facts(test, whole), **other.provenance}
    target = out or _default_target(about, other.names(chosen), threat, samples=len(test), seed=seed)
    return evaluate(
        foreign.model,
        test.images(torch.arange(len(test))),
        test.y,
        threat,
        attacks=chosen,
        surrogate=other.model,
        ids=places(test, whole),
        device=device,
        batch_size=batch_size,
        precision=precision,
        doubt=doubt,
        keep_adversarial=keep_adversarial,
        journal=target.with_suffix(".part") if journal or resume else None,
        resume=resume,
        seed=seed,
        progress=progress,
        provenance=about,
    )


def _opened(
    model: str | None, made: Mapping[str, Any], which: str, faults: Sequence[str], progress: Progress
) -> Foreign:
    """The network, and a word on what it is; its faults and all others are one error."""
    faults = [*model_faults(model, **made), *faults]
    if faults:
        raise ConfigError("the evaluation cannot start:", tuple(faults))
    foreign = open_foreign(model, which=which, **made)
    for line in foreign.lines():
        progress.say(line)
    return foreign


def _test_set(
    foreign: Foreign, name: str, limit: int | None, folder: Path | None, where: torch.device, num_classes: int | None
) -> tuple[Dataset, Dataset]:
    """The test set or a fair subset of it, on which the network can work, and the whole."""
    whole = load_data(name, "test", folder=folder)
    test = fair_subset(whole, limit)
    _examine(foreign, test, where, num_classes)
    return test, whole


def _data_facts(test: Dataset, whole: Dataset) -> dict[str, str]:
    return {"dataset": test.name, "data": f"{test.name} test, {len(test)} of {len(whole)} samples"}


def store_foreign(result: Result, out: Path | None = None) -> Path:
    """Write a result of evaluate_foreign to `out`, or to a file in the current folder that its content names."""
    about = result.provenance
    threat = THREATS[result.threat["norm"]](result.threat["eps"])
    named = _default_target(about, sorted(result.per_attack), threat, samples=result.n, seed=int(about["seed"]))
    target = out or named
    if result.adversarial is not None:
        save(adversarial_file(target), {"x_adv": result.adversarial}, {"role": "adversarial", **about})
    write_atomic(target, result.to_json().encode())
    discard(target.with_suffix(".part"))
    return target


def _default_target(
    about: Mapping[str, Any], attacks: Sequence[str], threat: Threat, *, samples: int, seed: int
) -> Path:
    """result-<model>-<data>-<threat>-<attacks>-n<samples>-seed<seed>-<begin of the weights' sha256>.json.

    A surrogate adds -from- and the begin of its digest.
    """
    parts = [about["model"], about["dataset"], f"{threat.norm}{threat.eps:.4g}", brief("+".join(attacks))]
    parts += [f"n{samples}", f"seed{seed}", *([about["weights_sha256"][:8]] if about["weights_sha256"] else [])]
    return Path(re.sub(r"[^\w.=+-]+", "_", "-".join(["result", *parts])) + surrogate_mark(about) + ".json")


def _faults(
    data: str | None,
    norm: str | None,
    eps: float | str | None,
    attacks: Attacks,
    transfers: bool,
    precision: str,
    device: torch.device | str,
    out: Path | None,
) -> list[str]:
    """What is wrong with the options that do not describe the model."""
    faults = [
        f"{name}: not given; {hint}"
        for name, value, hint in (
            ("data", data, f"name a test set: {', '.join(DATA.names())}"),
            ("norm", norm, f"name the norm of the threat: {', '.join(THREATS)}"),
            ("eps", eps, "give the radius of the threat in pixel units of [0, 1], such as 8/255"),
        )
        if value is None
    ]
    if data is not None and data not in DATA:
        faults.append(f"data: {unknown('dataset', data, DATA.names())}")
    if norm is not None and norm not in THREATS:
        faults.append(f"norm: {unknown('norm', norm, THREATS)}")
    if eps is not None:
        # A radius that is no number is wrong in any norm, one that is too large depends on it.
        faults += _caught("eps", lambda: THREATS[norm](number(eps)) if norm in THREATS else number(eps))
    # The surrogate is opened later; names can be checked with anything in its place.
    faults += _caught("attacks", lambda: make_plan(attacks, surrogate=nn.Identity() if transfers else None))
    faults += _caught("precision", lambda: choose("evaluate", "precision", precision, PRECISIONS))
    faults += _caught("device", lambda: pick_device(device))
    return faults + ([] if out is None else _out_faults(out))


def _caught(where: str, make: Callable[[], object]) -> list[str]:
    """The faults that `make` raises, under the name of the option."""
    try:
        make()
    except ConfigError as error:
        return [f"{where}: {fault}" for fault in (error.faults or (str(error),))]
    except FlatrockError as error:
        return [f"{where}: {error}"]
    return []


def _out_faults(out: Path) -> list[str]:
    """A result may take the place of a result, and of nothing else."""
    if out.suffix != ".json":
        return [f"out: {out} must end in .json"]
    if not out.exists():
        return []
    try:
        Result.from_json(out.read_text())
    except (StateError, OSError, ValueError):
        return [f"out: {out} exists and is no result of an evaluation; it is left alone, choose another name"]
    return []


def _examine(foreign: Foreign, test: Dataset, where: torch.device, num_classes: int | None) -> None:
    """The network takes these inputs and has these classes, and its normalisation is not obviously wrong."""
    model = foreign.model
    x = test.images(torch.arange(min(len(test), 2))).to(where)
    check_model(model, x)
    with placed(model, where), borrowed(model, where), torch.no_grad():
        try:
            logits = model(x)
        except FlatrockError:
            raise
        except Exception as error:  # it is the user's code: anything can happen
            raise ModelError(
                f"{foreign.name} does not take inputs {list(x.shape)} of {test.name!r}: {type(error).__name__}: {error}"
            ) from error
        # Anything but rows of logits is refused by the evaluation itself, in its own words.
        classes = logits.shape[1] if isinstance(logits, Tensor) and logits.dim() == 2 else None
        for who, wanted in (("num_classes says", num_classes), (f"{test.name!r} has", test.num_classes)):
            if classes is not None and wanted not in (None, classes):
                raise ConfigError(f"{foreign.name} has {classes} classes, but {who} {wanted}")
        if not foreign.sure:
            _check_normalization(model, fair_subset(test, _TRIED), where)


def _check_normalization(model: nn.Module, few: Dataset, where: torch.device) -> None:
    """Refuse to go on without normalisation where another one is far better: nobody said that there is none."""
    x, y = few.images(torch.arange(len(few))).to(where), few.y.to(where)

    def right(network: nn.Module) -> int:
        return int((network(x).argmax(1) == y).sum())

    plain = right(model)
    fitting = {name: pair for name, pair in NORMALIZATIONS.items() if len(pair[0]) in (1, few.input_shape[0])}
    tried = {name: right(Normalized(model, pair)) for name, pair in fitting.items()}
    clear = max(_LEAST, _GAIN * len(y))
    best = max(tried, key=lambda name: tried[name])
    # Those of similar data sets differ little: the data set's own wins unless another is clearly better.
    if few.name in tried and tried[best] - tried[few.name] < clear:
        best = few.name
    if tried[best] - plain >= clear:
        raise ConfigError(
            f"the weights come without normalisation, and so the network is right on {plain} of {len(y)} samples, but "
            f"on {tried[best]} with that of {best!r}; say --normalize {best}, or --normalize none to go on without"
        )
