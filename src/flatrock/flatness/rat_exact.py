"""The derivative terms of RAT as its Eq. 8 writes them, by forward-mode differentiation of the network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp

from flatrock.core.borrow import mode
from flatrock.core.errors import ModelError
from flatrock.core.hooks import Shift


def directional(model: nn.Module, x: Tensor, u: Shift, *, order: int) -> tuple[Tensor, ...]:
    """(J u,) or (J u, u^T H u), each [n, C]: derivatives along u of every logit w.r.t. the weights named in u.

    They are d/dt and d^2/dt^2 of f_{w+tu}(x) at t = 0, in the model's current mode, and can be differentiated w.r.t.
    every parameter.
    """
    start: dict[str, Tensor] = {name: model.get_parameter(name) for name in u}
    along = (dict(u),)

    def logits(p: dict[str, Tensor]) -> Tensor:
        out: Tensor = functional_call(model, p, (x,))
        return out

    def slope(p: dict[str, Tensor]) -> Tensor:
        out: Tensor = jvp(logits, (p,), along)[1]
        return out

    if order == 1:
        return (slope(start),)
    return jvp(slope, (start,), along)[:2]


def exact_terms(model: nn.Module, x: Tensor, x_adv: Tensor, u: Shift, *, order: int) -> list[Tensor]:
    """KL(softmax(J_x u) || softmax(J_x' u)) and, for order 2, the same of u^T H u; means over the batch.

    BatchNorm and dropout are in eval mode here: f_w(x) is then a function of one sample, and no buffer moves.
    """
    with mode(model, training=False):
        # Not kept_buffers: copying buffers back would count as a change to what backward has saved.
        try:
            both = directional(model, torch.cat([x, x_adv]), u, order=order)
        except NotImplementedError as error:
            raise ModelError(
                f"rat's exact terms need forward-mode derivatives, which torch lacks for this network: {error}; "
                "use terms: top_layer"
            ) from error
    return [_kl(*values.chunk(2)) for values in both]


def _kl(a: Tensor, b: Tensor) -> Tensor:
    # Small noise makes nearly uniform distributions, whose divergence is below the rounding of float32.
    log_a, log_b = a.double().log_softmax(1), b.double().log_softmax(1)
    return F.kl_div(log_b, log_a, reduction="batchmean", log_target=True).to(a.dtype)
