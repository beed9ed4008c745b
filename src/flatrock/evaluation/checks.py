"""Doubts about an evaluation, each a Finding whose code is a section of docs/diagnostics.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from flatrock.attacks.craft import looks_like_probabilities
from flatrock.core.chance import guessed
from flatrock.core.records import Finding
from flatrock.core.rounding import gap

TEST_SELECTED = "test-selected"
# Share of samples with no gradient at all that is still put down to saturation.
FEW_ZEROS = 0.05
# What black-box attacks may find after white-box ones: this share (the official AutoAttack's bound), and one sample,
# which in a small set is a large share and still chance.
BLACK_BOX_GAIN = 0.002
# Share of disputed samples worth mentioning.
FEW_DISPUTES = 0.005
# Fewer samples may have one answer by chance.
TELLING = 10


def check_mode(model: nn.Module) -> list[Finding]:
    """E01: the model came in train mode."""
    if not any(getattr(m, "training", False) for m in model.modules()):
        return []
    return [
        Finding(
            "E01",
            "the model was in train mode; it was evaluated in eval mode and given back as it was",
            "call model.eval() before evaluating so that your other numbers agree with these",
        )
    ]


def check_probabilities(logits: Tensor) -> list[Finding]:
    """E02: outputs lie in [0, 1], as those of a softmax or a sigmoid, whose gradients vanish where the model is sure.

    Of few samples, logits may lie there by chance; that they sum to 1, too, is none.
    """
    if looks_like_probabilities(logits):
        what, made = "probabilities", "softmax"
    elif len(logits) >= TELLING and bool(((logits >= 0) & (logits <= 1)).all()):
        what, made = "numbers between 0 and 1, as of a sigmoid", "sigmoid"
    else:
        return []
    return [
        Finding(
            "E02",
            f"the model seems to return {what}, not logits; gradient attacks are weaker on them",
            f"return the input of the final {made}",
        )
    ]


def check_finite(broken_answers: Mapping[str, int]) -> list[Finding]:
    """E04: the model gave NaN or infinite logits on attacked inputs; such a sample counts as broken."""
    return [
        Finding(
            "E04",
            f"the model returned NaN or infinite logits for {count} samples under {name}; they count as broken",
            "find the operation that overflows: a model without an answer is not robust",
        )
        for name, count in broken_answers.items()
        if count
    ]


def all_marks(model: nn.Module, told: Sequence[str]) -> tuple[str, ...]:
    """The marks told, and those that `flatrock.load` left on the model or on any network inside it."""
    left = (getattr(m, "marks", ()) for m in model.modules())
    found = [name for marks in left if isinstance(marks, tuple) for name in marks if isinstance(name, str)]
    return tuple(dict.fromkeys([*((told,) if isinstance(told, str) else told), *found]))


def check_marks(marks: tuple[str, ...]) -> list[Finding]:
    """E03: the weights were chosen by looking at the test set."""
    if TEST_SELECTED not in marks:
        return []
    return [
        Finding(
            "E03",
            "the checkpoint was selected on the test set, so its test accuracy is optimistic",
            "train with select.data: held_out to get an unbiased number",
        )
    ]


def collapsed(said: Tensor, y: Tensor) -> bool:
    """Whether all samples have one answer, and enough of them, or half of few, are of other classes."""
    if len(y) < TELLING or not bool((said == said[0]).all()):
        return False
    return int((y != said[0]).sum()) >= min(TELLING, len(y) / 2)


def check_collapse(logits: Tensor, y: Tensor) -> list[Finding]:
    """E15: one answer to clean inputs of several classes; the model is right at the rate of that class."""
    said = logits.argmax(1)
    if not collapsed(said, y):
        return []
    return [
        Finding(
            "E15",
            f"the model answers {int(said[0])} to all {len(y)} clean samples; it is right at the rate of that class, "
            "and surviving attacks means nothing then",
            "this is no robustness: train it again (a lower learning rate), or look for wrong weights or normalisation",
        )
    ]


def check_chance(logits: Tensor, y: Tensor) -> list[Finding]:
    """E16: a clean accuracy of at most p + 2 sqrt(p (1 - p) / n), p = 1 / classes; one answer to all is E15."""
    n, p = len(y), 1 / logits.shape[1]
    said = logits.argmax(1)
    right = float((said == y).double().mean())
    most = guessed(logits.shape[1], n)
    if most >= 1 or right > most or collapsed(said, y):
        return []
    return [
        Finding(
            "E16",
            f"the model is right on {100 * right:.2f} % of {n} clean samples; guesses among {logits.shape[1]} classes "
            f"reach up to {100 * most:.2f} % (mean {100 * p:.2f}, and two standard errors)",
            "no attack says anything of it: look for wrong weights, another order of classes or another normalisation",
        )
    ]


def check_random(
    first: Tensor, second: Tensor, *, votes: int = 1, means: bool = False, mixed: bool = False
) -> list[Finding]:
    """E05: the model answers the same input differently; `means`: attacks average passes, as they should then.

    `mixed`: not by chance, but because of the other samples in the batch.
    """
    apart = gap(first, second)
    if apart == 0:  # false for NaN, which is another answer too
        return []
    if mixed:
        return [
            Finding(
                "E05",
                "the model's answer to an input depends on the other samples of its batch (leads differ by "
                f"{100 * apart:.2g} % of the widest); the number holds for these batches only",
                "votes do not help: take nothing from the batch in eval mode, neither mean nor statistics "
                "(BatchNorm with track_running_stats=True) nor a scale (dynamic quantization), or evaluate "
                "one sample at a time, --batch-size 1",
            )
        ]
    seen = f"the model answers the same input differently (leads differ by {100 * apart:.2g} % of the widest)"
    single = "; each verdict is one draw: an unlucky one breaks what mostly stands, a lucky one saves what mostly falls"
    cures = [] if votes > 1 else ["let a majority decide, --votes 15 (votes=15)"]
    if not means:
        cures.append("use the plan autoattack-rand, whose gradients are means over 20 passes, or attacks with eot=20")
    done = f"{votes} votes decide and attacks climb means over draws; say both beside the number"
    return [Finding("E05", seen + (single if votes == 1 else ""), ", and ".join(cures) or done)]


def check_gradients(sizes: Tensor, moved: Tensor | None = None) -> list[Finding]:
    """E06: the loss has no gradient for many inputs, or one that is not finite for any; else so at points `moved`."""
    found = _masked(sizes, "inputs looked at")
    return found or ([] if moved is None else _masked(moved, "random points looked at in the balls around inputs"))


def _masked(sizes: Tensor, where: str) -> list[Finding]:
    """E06 from the sizes of gradients at some points."""
    found = []
    zeros = float((sizes == 0).double().mean()) if sizes.numel() else 0.0
    if zeros > FEW_ZEROS:
        found.append(
            Finding(
                "E06",
                f"{100 * zeros:.0f} % of the {where} have a gradient of exactly zero; gradient attacks idle",
                "return logits without a large factor, attack without rounding, argmax or detach on the way or with an "
                "approximate gradient for it (docs/diagnostics.md, E06); square needs no gradient",
            )
        )
    odd = int((~torch.isfinite(sizes)).sum())
    if odd:  # rounding and saturation make zeros, never these
        found.append(
            Finding(
                "E06",
                f"{100 * odd / sizes.numel():.0f} % of the {where} have a NaN or infinite gradient; "
                "gradient attacks idle",
                "find the operation behind it (sqrt, log, a division, even in the branch torch.where leaves out); "
                "rely on square, which needs no gradient",
            )
        )
    return found


def check_black_box(found: Mapping[str, int], samples: int) -> list[Finding]:
    """E07: an attack without gradients found what attacks with gradients had missed."""
    return [
        Finding(
            "E07",
            f"{label} broke {100 * count / samples:.2f} % of the samples after gradient attacks had given up on them",
            "the gradients mislead; look for quantisation, randomness or saturation in the model",
        )
        for label, count in found.items()
        if count > max(BLACK_BOX_GAIN * samples, 1)
    ]


def check_disputes(disputed: int, samples: int) -> list[Finding]:
    """E11: half precision called samples broken that full precision did not."""
    if disputed <= FEW_DISPUTES * samples:
        return []
    return [
        Finding(
            "E11",
            f"half precision called {disputed} samples broken that float32 gets right; they were attacked again in it",
            "no sample counts as broken that float32 gets right, but inputs crafted in half precision need not be the "
            "strongest: compare with precision full",
        )
    ]


def check_few_classes(instead: Sequence[str], classes: int) -> list[Finding]:
    """E12: a plan's losses are not defined on so few classes."""
    if not instead:
        return []
    return [
        Finding(
            "E12",
            f"with {classes} classes the plan climbs {' and '.join(instead)}",
            "compare only with results obtained the same way",
        )
    ]


def check_precision(note: str) -> list[Finding]:
    """E13: attacks could not use half precision."""
    if not note:
        return []
    return [Finding("E13", f"attacks craft in full precision: {note}", "the number is right, only slower")]


def check_dynamic(called: Sequence[str]) -> list[Finding]:
    """E14: answering, the model computes gradients itself: it changes with its input, as an attack would."""
    if not called:
        return []
    return [
        Finding(
            "E14",
            f"the model computes gradients while it answers ({', '.join(called)}); attacks see a part of that",
            "attack it through all of its own steps, with an attack written for it; the number is an upper bound",
        )
    ]


def check_seen(shared: int, samples: int) -> list[Finding]:
    """E18: samples of the test set that are in the training set, too."""
    if not shared:
        return []
    return [
        Finding(
            "E18",
            f"{shared} of the {samples} test samples are in the training set, too",
            "what was trained on tells little of new samples; leave these out of one of the two sets",
        )
    ]


def check_normalization(samples: int, right: int, better: tuple[str, int] | None) -> list[Finding]:
    """E19: with another normalisation than the one that was asked for, the model is right on far more samples."""
    if better is None:
        return []
    return [
        Finding(
            "E19",
            f"the model is right on {right} of {samples} clean samples, but on {better[1]} with the normalisation of "
            f"{better[0]!r} instead",
            f"if it was trained with that, say --normalize {better[0]}; under a wrong one no number is the model's",
        )
    ]


def check_idle(labels: Sequence[str]) -> list[Finding]:
    """E17: attacks that were told to make no step."""
    if not labels:
        return []
    return [
        Finding(
            "E17",
            f"no gradient step is made by {', '.join(labels)}: inputs are where the attack would have started",
            "this is noise, not an attack, and most models stand it; give it steps, such as pgd-20",
        )
    ]
