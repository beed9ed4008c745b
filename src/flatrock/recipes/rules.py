"""Rules between the sections of a recipe: names exist, options fit, and the parts can work together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from flatrock.attacks.catalog import ATTACKS, parse_attack
from flatrock.attacks.craft import check_attack
from flatrock.core.guests import is_own
from flatrock.core.hooks import Flatness
from flatrock.core.registry import unknown
from flatrock.core.rng import Seed
from flatrock.core.threat import THREATS
from flatrock.data.augment import MIXING
from flatrock.data.catalog import data_options, info
from flatrock.data.loader import extra_share
from flatrock.engine.schedule import SCHEDULES
from flatrock.evaluation.plans import make_plan
from flatrock.flatness.catalog import FLATNESS
from flatrock.models.catalog import create_model
from flatrock.models.classifier import Classifier
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.optimizers.catalog import OPTIMIZERS, own_options
from flatrock.recipes.draft import Draft
from flatrock.recipes.further import check_further
from flatrock.recipes.keys import Named
from flatrock.recipes.optimizer import build_optimizer, trial_model
from flatrock.recipes.overlay import several
from flatrock.recipes.own import check_loss, check_rates
from flatrock.recipes.pieces import data_shape, model_options
from flatrock.recipes.schema import (
    Data,
    EngineKeys,
    Evaluate,
    InnerAttack,
    Network,
    Optimizer,
    Select,
    ThreatKeys,
    Train,
)

INNER_ATTACKS = {"ce": "pgd", "kl": "kl-pgd", "guided": "guided", "none": "none"}


def examined(sections: dict[str, Any]) -> Draft:
    """What could be built from the sections, and every broken rule."""
    draft = Draft(sections)
    before = (_threat, _objective, _data, _inner_attack, _optimizer, _schedule, _network)
    for rule in (*before, _own_objective, _flatness, _plans, check_further, _sizes, _pictures, _labels):
        known = len(draft.faults)
        rule(draft)
        if rule not in (_threat, _data, _network):  # all that a trained network needs
            draft.of_training += draft.faults[known:]
    return draft


def _threat(draft: Draft) -> None:
    if threat := draft.get("threat", ThreatKeys):
        draft.threat = draft.build("threat", lambda: THREATS[threat.norm](threat.eps))


def _objective(draft: Draft) -> None:
    if objective := draft.get("objective", Named):
        draft.objective = draft.build("objective", lambda: OBJECTIVES.make(objective.name, **objective.options))


def _own_objective(draft: Draft) -> None:
    """An objective of the user's gives a loss; asked once the network is known, which has classes and features."""
    section, objective, model = draft.get("objective", Named), draft.objective, draft.model
    if objective is not None and isinstance(model, Classifier) and is_own(section.name):
        draft.build("objective", lambda: check_loss(section.name, objective, model))


def _data(draft: Draft) -> None:
    if data := draft.get("data", Data):
        draft.source = draft.build("data", lambda: info(data.name))
        if draft.source is not None:
            unknown_ones = draft.option_faults("data", data, data_options(data.name, data.options))
            draft.shape = draft.source.input_shape if unknown_ones else draft.build("data", partial(data_shape, data))


def _inner_attack(draft: Draft) -> None:
    """The attack exists, and there is one exactly when the objective uses it."""
    section, objective = draft.get("attack", InnerAttack), draft.objective
    if section is None:
        return
    name = section.name
    if objective is None and name == "auto":  # its own fault is noted; all but GAT's attack take pgd's options
        name = "guided" if getattr(draft.sections.get("objective"), "name", "") == "gat" else "pgd"
    if objective is not None:
        name = INNER_ATTACKS[objective.inner_loss] if name == "auto" else name
        if (objective.inner_loss == "none") != (name == "none"):
            uses = "uses no attack; leave out attack.name" if objective.inner_loss == "none" else "needs an attack"
            draft.note(f"attack.name: got {name!r}, but the objective {uses}")
            return
    if name == "none" or (name in ATTACKS and draft.option_faults("attack", section, ATTACKS.entry(name).options())):
        return
    draft.attack = draft.build("attack", lambda: ATTACKS.make(name, **section.options))


def _optimizer(draft: Draft) -> None:
    """The optimizer exists and takes these options."""
    section = draft.get("optimizer", Optimizer)
    if section is None:
        return
    if section.name not in OPTIMIZERS and not is_own(section.name):
        draft.note(f"optimizer.name: {unknown('optimizer', section.name, OPTIMIZERS.names())}")
    elif is_own(section.name) or not draft.option_faults("optimizer", section, own_options(section.name)):
        draft.optimizer = draft.build("optimizer", lambda: build_optimizer(section, trial_model(section), Seed(0)))


def _flatness(draft: Draft) -> None:
    """Every method exists and takes its options, suits the network, and gets along with the rest."""
    made: dict[str, Flatness] = {}
    for i, section in enumerate(draft.get("flatness", tuple) or ()):
        where = f"flatness[{i}] {section.name}"
        if fault := "the method is there twice; keep one" if section.name in made else several(section.name):
            draft.note(f"{where}: {fault}")
            continue
        method = draft.build(where, partial(FLATNESS.make, section.name, **section.options))
        if method is not None:
            made[section.name] = method
            if draft.model is not None:
                draft.build(where, partial(method.check, draft.model))
            if draft.objective is not None:
                draft.build(where, partial(method.check_objective, draft.objective))
    _companions(draft, made)


def _companions(draft: Draft, made: dict[str, Flatness]) -> None:
    """The methods get along with each other, the objective, the engine, the size of batches and the optimizer."""
    for what, names in (
        ("move the weights the loss sees", [n for n, m in made.items() if m.moves_weights]),
        ("keep an average", [n for n, m in made.items() if m.averages]),
    ):
        if len(names) > 1:
            draft.note(f"flatness: {' and '.join(names)} both {what}; keep one of them")
    engine, train = draft.get("engine", EngineKeys), draft.get("train", Train)
    fast = engine is not None and (engine.precision == "bfloat16" or engine.compile is True)
    refused: Sequence[tuple[bool, Callable[[Flatness], bool], str]] = (
        (
            draft.objective is not None and draft.objective.inner_loss == "none",
            lambda m: m.needs_attack,
            "it needs adversarial inputs, and the objective makes none; use at or trades",
        ),
        (
            fast,
            lambda m: m.needs_reference,
            "it differentiates the network itself; set engine: {} (float32, not compiled)",
        ),
        (
            train is not None and train.micro_batch is not None,
            lambda m: m.takes_whole_batch,
            "it runs the network on the whole batch itself; leave out train.micro_batch",
        ),
        (
            getattr(draft.optimizer, "inner_loops", 1) > 1,
            lambda m: m.moves_weights and not m.steps_inside,
            "step 'after' puts the weights back before the optimizer's inner loop has asked for its gradients there; "
            "use step: inside",
        ),
    )
    for applies, minds, why in refused:
        for name in [n for n, m in made.items() if applies and minds(m)]:
            draft.note(f"flatness {name}: {why}")


def _schedule(draft: Draft) -> None:
    schedule, train = draft.get("schedule", Named), draft.get("train", Train)
    if schedule is None:
        return
    if given := sorted({"lr", "epochs"} & schedule.options.keys()):
        draft.note(f"schedule: {' and '.join(given)} belong to optimizer.lr and train.epochs")
        return
    epochs = math.inf if train is None else train.epochs  # a faulty train section must not hide faults here
    options = {"lr": getattr(draft.get("optimizer", Optimizer), "lr", 0.0), "epochs": epochs, **schedule.options}
    made = draft.build("schedule", lambda: SCHEDULES.make(schedule.name, **options))
    if made is not None and is_own(schedule.name) and train is not None:
        draft.build("schedule", lambda: check_rates(schedule.name, made))


def _network(draft: Draft) -> None:
    """The model exists, takes these options, and fits the data."""
    network, source = draft.get("model", Network), draft.source
    if network is None or source is None:
        return
    draft.classes = network.num_classes or source.num_classes
    if draft.classes is None:
        draft.note(f"model.num_classes: needed with data {source.name!r}, whose class count is not known in advance")
        return
    options = model_options(network, draft.shape)
    if "seed" in options:
        draft.note("model.seed: weights are drawn from the recipe's seed; set that, or call the option another name")
        return
    # No memory is taken and no weight is drawn, but where somebody else's code might not stand it.
    with nullcontext() if is_own(network.name) else torch.device("meta"):
        model = draft.build(
            "model",
            lambda: create_model(network.name, num_classes=draft.classes or 2, normalize=network.normalize, **options),
        )
    if model is None:
        return
    draft.model = model
    if draft.shape is None:
        _own_images(draft, tuple(model.input_shape))
    elif draft.shape != tuple(model.input_shape):
        draft.note(f"model: {network.name!r} takes {model.input_shape}, {source.name!r} has {draft.shape}")
    if source.num_classes is not None and draft.classes != source.num_classes:
        draft.note(f"model.num_classes: got {draft.classes}, but {source.name!r} has {source.num_classes} classes")


def _own_images(draft: Draft, shape: tuple[int, ...]) -> None:
    """Only their files know how large they are, but they must be what the model takes."""
    data, network = draft.get("data", Data), draft.get("model", Network)
    channels, images = data.options.get("channels", 3), "channels" in data_options(data.name)
    if images and channels not in (1, 3):
        return  # noted already
    if images and (len(shape) != 3 or channels != shape[0]):
        draft.note(
            f"data.channels: got {channels!r}, but {network.name!r} takes inputs {shape} (channels, height, width)"
        )
    else:
        draft.shape = shape


def _plans(draft: Draft) -> None:
    """The attacks of training, selection and evaluation exist and suit the threat and the class count."""
    threat, classes, inner = draft.threat, draft.classes, draft.attack
    if inner is not None:
        draft.build("attack", lambda: check_attack(inner, threat, classes))
    if select := draft.get("select", Select):
        draft.build("select.attack", lambda: check_attack(parse_attack(select.attack)[1], threat, classes))
    if evaluate := draft.get("evaluate", Evaluate):
        draft.build("evaluate.attacks", lambda: make_plan(evaluate.attacks, classes=classes, threat=threat))


def _sizes(draft: Draft) -> None:
    """There is something to train on and something to choose by, where the sizes are known before loading."""
    data, train, select = draft.get("data", Data), draft.get("train", Train), draft.get("select", Select)
    if data is None:
        return
    if data.held_out == 0 and select is not None and select.data == "held_out":
        draft.note(
            "data.held_out: got 0, but the best epoch is chosen on held-out data; hold some out or use select: test"
        )
    if data.extra is not None and train is not None:
        draft.build("data.extra", partial(extra_share, train.batch_size, data.extra.fraction))
    known = draft.source and draft.source.train_size
    total = known and data.options.get("points", known)
    if not isinstance(total, int) or isinstance(total, bool):
        return
    if data.held_out > total // 2:
        draft.note(f"data.held_out: {data.held_out} is more than half of the {total} training samples")
        return
    left = min(total - data.held_out, data.limit or total)
    if train is not None and train.batch_size > left:
        draft.note(f"train.batch_size: {train.batch_size} is more than the {left} samples to train on")


def _pictures(draft: Draft) -> None:
    """Augmentation suits the inputs, and eps the box."""
    data, threat, shape = draft.get("data", Data), draft.get("threat", ThreatKeys), draft.shape
    if data is None or shape is None:
        return
    augment, side = data.augment, min(shape[1:]) if len(shape) == 3 else 0
    used = augment.model_dump(exclude={"crop_fill", "rotation_mode", "mixup"})
    if len(shape) != 3 and any(used.values()):
        draft.note(f"data.augment: {data.name!r} holds points, not images; only mixup applies")
    elif augment.crop >= side and augment.crop_fill == "reflect":
        draft.note(f"data.augment.crop: reflect padding of {augment.crop} needs images larger than {side} pixels")
    elif augment.cutout > side:
        draft.note(f"data.augment.cutout: a square of {augment.cutout} does not fit {side} pixels")
    elif augment.shift and augment.shift >= side:
        draft.note(f"data.augment.shift: {augment.shift} lines less leave nothing of {side} pixels")
    if threat is not None and threat.eps > math.sqrt(math.prod(shape)):
        draft.note(f"threat.eps: {threat.eps:g} exceeds the diameter of the input box; write {threat.eps:g}/255?")


def _labels(draft: Draft) -> None:
    """Mixed labels only with objectives and attacks that are defined on them, and mixed once."""
    data = draft.get("data", Data)
    mixing = [name for name in MIXING if data is not None and getattr(data.augment, name)]
    if len(mixing) > 1:
        draft.note("data.augment: mixup and cutmix both mix a batch; set one of them to 0")
    for one in mixing:
        if draft.objective is not None and draft.objective.hard_labels:
            name = draft.sections["objective"].name
            draft.note(f"data.augment.{one}: objective {name!r} needs hard labels; set {one} to 0")
        if draft.attack is not None and not draft.attack.mixed_labels:
            draft.note(f"data.augment.{one}: the attack is not defined on mixed labels; use pgd or set {one} to 0")
        if data.extra is not None:
            draft.note(f"data.augment.{one}: cannot be combined with data.extra; set {one} to 0")
