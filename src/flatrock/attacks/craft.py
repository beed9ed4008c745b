"""The guard around every attack: checks what goes in and, in float32 or better, what comes out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset as SampleSet

from flatrock.attacks.answers import answer
from flatrock.attacks.written import is_ours, tried
from flatrock.core.borrow import borrowed
from flatrock.core.device import memory_is_short
from flatrock.core.errors import ConfigError, FlatrockError, ModelError, ThreatError, in_words, shown
from flatrock.core.guests import raised_at
from flatrock.core.rng import SampleGen
from flatrock.core.threat import Threat
from flatrock.core.types import Attack

# Rounding in float32 may leave ball and box by about 1e-7; anything above this is a fault.
SLACK = 1e-6
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Inputs without a negative number whose largest is one of these have not been divided by 255; of normalised ones it is
# less.
BYTES = (8, 255)
HALF = (torch.float16, torch.bfloat16)


def check_samples(x: Tensor, y: Tensor) -> None:
    """Inputs are finite floats [n, ...] with one class index each; else ThreatError."""
    for name, value in (("inputs", x), ("labels", y)):
        check_given(value, name=name)
    if x.layout != torch.strided:
        raise ThreatError(f"inputs must be a dense tensor, got one of layout {x.layout}; use x.to_dense()")
    if x.dtype not in (torch.float32, torch.float64) or x.dim() < 2:
        cures = {torch.uint8: "; divide by 255: x.float() / 255", **dict.fromkeys(HALF, "; use x.float()")}
        cure = cures.get(x.dtype, "")
        raise ThreatError(f"inputs must be float32 or float64 [n, ...], got {x.dtype} of shape {tuple(x.shape)}{cure}")
    if x.shape[0] and not x.numel():
        raise ThreatError(f"inputs of shape {tuple(x.shape)} hold no numbers; look at how they were cut out")
    if y.shape != x.shape[:1] or y.dtype != torch.int64:
        raise ThreatError(
            f"labels must be integers (torch.int64) of shape ({x.shape[0]},), got {y.dtype} of {tuple(y.shape)}; "
            f"{_label_cure(x, y)}"
        )
    if not bool(torch.isfinite(x).all()):
        raise ThreatError("inputs contain NaN or infinity; clean the data first")


def check_given(*values: object, name: str = "inputs") -> None:
    """Each is a tensor; else ThreatError says how to make one of it."""
    for value in values:
        if not isinstance(value, Tensor):
            raise ThreatError(f"{name} must be a torch tensor, got {type(value).__name__}; {_tensor_cure(value)}")


def _tensor_cure(value: object) -> str:
    """How to make tensors of what is none."""
    if hasattr(value, "dataset") and hasattr(value, "__iter__"):
        return "write x, y = map(torch.cat, zip(*loader)) first, and give both"
    if hasattr(value, "images") and hasattr(value, "y"):  # of flatrock.data
        return "write x, y = data.images(torch.arange(len(data))), data.y first, and give both"
    if isinstance(value, tuple | list) and len(value) == 2 and all(hasattr(one, "shape") for one in value):
        return "give inputs and labels as two arguments"
    pairs = isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple) and len(value[0]) == 2
    if isinstance(value, SampleSet) or (pairs and hasattr(value[0][0], "shape")):  # type: ignore[index]
        loader = "torch.utils.data.DataLoader(dataset, batch_size=len(dataset))"
        return f"write x, y = next(iter({loader})) first, and give both"
    return "use torch.as_tensor"


def usable(given: Tensor) -> Tensor:
    """What was made in inference mode can take no part in gradients; a copy can."""
    return given.clone() if given.is_inference() else given


def class_indices(y: Tensor) -> Tensor:
    """Labels of any integer type as those torch indexes with; what else they may be is left to `check_samples`."""
    return usable(y.long()) if isinstance(y, Tensor) and y.dtype in INTEGERS else y


def _label_cure(x: Tensor, y: Tensor) -> str:
    """What to do about labels of a wrong shape or type."""
    if y.shape == x.shape[:1]:
        return "use y.long()"
    if y.dim() == 2 and y.shape[0] == x.shape[0]:
        return "use y.squeeze(1)" if y.shape[1] == 1 else "if they are one-hot, use y.argmax(1)"
    if y.numel() == 1 and x.dim() == 3:
        return "give one label per input; a single image needs a batch of one: x[None], y.reshape(1)"
    return "give one label per input"


def check_inputs(x: Tensor, y: Tensor, threat: Threat) -> Tensor:
    """The inputs, if they lie in [0, 1] with one class index each and eps fits the box; else ThreatError.

    What rounding put beside the box comes back inside it; the tensor given is left as it is.
    """
    if not isinstance(threat, Threat):
        raise ThreatError(f"threat must be flatrock.Linf(eps) or flatrock.L2(eps), got {shown(threat)}")
    check_samples(x, y)
    x = usable(x.detach())
    if x.shape[0] == 0:
        return x
    low, high = float(x.min()), float(x.max())
    if low < -SLACK or high > 1 + SLACK:
        cure = "use x / 255" if BYTES[0] < high <= BYTES[1] and low >= 0 else "put normalisation inside the model"
        raise ThreatError(f"inputs must lie in [0, 1], got [{low:.3g}, {high:.3g}]; {cure}")
    diameter = math.sqrt(x[0].numel())
    if threat.eps > diameter:
        raise ThreatError(f"eps {threat.eps:g} exceeds the diameter {diameter:.3g} of the input box; write 128/255?")
    return x.clamp(0, 1) if low < 0 or high > 1 else x


def check_ids(ids: Tensor, samples: int) -> Tensor:
    """Numbers of samples, one integer each and all different, on the CPU; else ThreatError."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.shape != (samples,):
        said = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ThreatError(f"ids must be {samples} integers, one per sample, got {said}; give dataset.ids or leave them")
    ids = ids.detach().to("cpu", torch.int64)
    if len(set(ids.tolist())) != samples:
        raise ThreatError("ids must differ: samples with the same id would get the same random numbers")
    return ids


def check_attack(attack: Attack, threat: Threat | None, classes: int | None) -> None:
    """ConfigError if the attack, where it has limits, cannot work under this threat or with so few classes.

    None: not known yet. An attack with limits has a method `check`, which it obeys too when it is called.
    """
    check: Callable[[Threat | None, int | None], None] | None = getattr(attack, "check", None)
    if check is not None:
        check(threat, classes)


def check_weights(model: nn.Module) -> None:
    """ModelError if weights have no values."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(is_lazy(t) for t in tensors):
        raise ModelError("the model has lazy layers without weights yet; pass a batch through it first: model(x[:2])")
    if any(t.is_meta for t in tensors):
        raise ModelError(
            "the model is on the meta device, without values; use model.to_empty(device=...) and load them"
        )


def check_model(model: nn.Module, x: Tensor) -> None:
    """A module whose weights are there and have the dtype of the inputs; else ModelError."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module that maps inputs to logits, got {type(model).__name__}")
    if torch.is_inference_mode_enabled():
        raise ModelError("attacks need gradients; call this outside torch.inference_mode()")
    check_weights(model)
    tensors = [*model.parameters(), *model.buffers()]
    if any(t.is_inference() for t in tensors):
        raise ModelError(
            "the model was made in torch.inference_mode(), so it has no gradients; use copy.deepcopy(model)"
        )
    odd = {p.dtype for p in model.parameters() if p.is_floating_point()} - {x.dtype}
    if odd:
        cure = "use model.float() and x.float()" if odd & {*HALF} else "use model.to(x.dtype), or convert x"
        raise ModelError(f"the model has {odd.pop()} weights but the inputs are {x.dtype}; {cure}")


def looks_like_probabilities(logits: Tensor) -> bool:
    """Every entry in [0, 1] and every row summing to 1."""
    inside = bool(((logits >= -1e-5) & (logits <= 1 + 1e-5)).all())
    return inside and bool(((logits.sum(1) - 1).abs() < 1e-5).all())


def check_logits(logits: Tensor, x: Tensor, y: Tensor) -> None:
    """One finite row of logits per input, and a class for every label; else ModelError."""
    _check_shape(logits, x, y)
    if not bool(torch.isfinite(logits).all()):
        masks = bool((logits == -torch.inf).any())
        cure = ", or a class is masked: give it a large finite negative number such as -1e4 instead of -inf"
        raise ModelError(
            f"the model returns NaN or infinite logits on clean inputs; its weights are damaged{cure if masks else ''}"
        )


def _check_shape(logits: Tensor, x: Tensor, y: Tensor) -> None:
    """One row of logits per input, and a class for every label; else ModelError."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != x.shape[0]:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        cure = "one row per input" if isinstance(logits, Tensor) else "the logits alone, such as model(x)[0]; wrap it"
        raise ModelError(
            f"the model must return logits of shape ({x.shape[0]}, classes), got {shape}; let it return {cure}"
        )
    if logits.shape[1] < 2:
        raise ModelError("the model returns one column; a classifier needs one logit per class (2 or more)")
    if y.numel() and (int(y.min()) < 0 or int(y.max()) >= logits.shape[1]):
        raise ModelError(
            f"labels span {int(y.min())}..{int(y.max())} but the model has {logits.shape[1]} classes "
            f"(0..{logits.shape[1] - 1}); check num_classes and the data set"
        )


def answered(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The logits of clean x; ModelError if they are none, or if the model fails, in its own words, or writes into x."""
    logits = asked(model, x)
    check_logits(logits, x, y)
    return logits


def asked(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What the model says to x; ModelError if it fails or writes into x."""
    given = x.clone()
    try:
        logits = model(given)
    except Exception as error:  # it is the user's code: anything can happen
        if isinstance(error, FlatrockError) or memory_is_short(error):
            raise
        climbed = ", and for such that require gradients" if x.requires_grad else ""
        raise ModelError(
            f"the model fails on inputs of shape {tuple(x.shape)}, {x.dtype} on {x.device}: {in_words(error)}; "
            f"is it made for such, images as [n, channels, height, width]{climbed}?"
        ) from error
    # Torch counts writes, those of a pass without gradients too, but not through `.data` or numpy.
    if given._version or not torch.allclose(given.detach(), x.detach(), rtol=0, atol=0, equal_nan=True):
        raise ModelError("the model writes into its input, which attacks still need; let it begin with x = x.clone()")
    return logits


class FirstChecked(nn.Module):
    """A model whose first answer, to all inputs with the labels y, is checked; costs no pass of its own.

    Most attacks ask about a random start first. Where the answer to one is not finite the clean inputs x are asked
    about too: a model that answers them is not damaged, but broken by the attack. Not a hook: TorchScript has none.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.inner, self._x, self._y = model, x, y
        self._classes: int | None = None  # once the first answer is checked

    def forward(self, x: Tensor) -> Tensor:
        """What the model says."""
        if self._classes is not None:
            return answer(self.inner, x, self._classes)
        logits = asked(self.inner, x)
        _check_shape(logits, x, self._y)
        if not bool(torch.isfinite(logits).all()):
            with torch.no_grad():
                answered(self.inner, self._x, self._y)
        self._classes = logits.shape[1]
        if looks_like_probabilities(logits):
            warnings.warn(
                "the model seems to return probabilities; attacks are weaker on them, return logits", stacklevel=2
            )
        return logits


def check_crafted(x_adv: Tensor, x: Tensor, threat: Threat, attack: object) -> None:
    """The perturbed inputs are finite, in the ball and in the box; else ThreatError names the attack."""
    if x_adv.shape != x.shape:
        raise ThreatError(f"{attack!r} changed the shape {tuple(x.shape)} to {tuple(x_adv.shape)}")
    if x.shape[0] == 0:
        return
    wide = torch.promote_types(x.dtype, torch.float32)
    x_adv, x = x_adv.to(wide), x.to(wide)
    if not bool(torch.isfinite(x_adv).all()):
        raise ThreatError(f"{attack!r} produced NaN or infinite inputs; look for such gradients in the model")
    over = float(threat.size(x_adv - x).max()) - threat.eps
    if over > SLACK:
        raise ThreatError(f"{attack!r} left the {threat.norm} ball of radius {threat.eps:g} by {over:.1e}")
    if float(x_adv.min()) < 0 or float(x_adv.max()) > 1:
        raise ThreatError(f"{attack!r} left the box [0, 1]")


def craft(
    attack: Attack,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    gen: SampleGen,
    *,
    early_stop: bool = False,
) -> Tensor:
    """Run an attack on a borrowed model (eval mode, frozen weights) and vouch for what it returns."""
    with borrowed(model, x.device):
        try:
            x_adv = tried(attack, model, x, y, threat, gen, early_stop=early_stop)
        except Exception as error:
            if is_ours(attack) or isinstance(error, FlatrockError) or memory_is_short(error):
                raise
            raise ConfigError(f"attack {attack!r} raised {in_words(error)}{raised_at(error, attack)}") from error
    check_crafted(x_adv, x, threat, attack)
    return x_adv
