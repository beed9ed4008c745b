"""A model that was attacked or evaluated comes back bit-identical, also when it raised inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attack_cases import BOUNDED, QUICK
from torch import Tensor, nn

from flatrock.attacks.catalog import attack
from flatrock.core.errors import ModelError
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import Linf
from flatrock.evaluation.evaluate import evaluate


class Boom(Exception):
    """Raised by the model."""


class Moody(nn.Module):
    """A network with something of everything that could be left changed."""

    calls: Tensor

    def __init__(self, boom_at: int | None) -> None:
        super().__init__()
        self.boom_at, self.count = boom_at, 0
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm, self.frozen_norm = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4 * 16, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.boom_at is not None and self.count >= self.boom_at:
            raise Boom
        self.calls += 1
        noise = 1e-6 * torch.rand(())  # a model that draws from the global generator
        x = self.dropout(self.frozen_norm(self.norm(self.conv(x + noise))).relu())
        logits: Tensor = self.head(x.flatten(1))
        return logits


def moody(boom_at: int | None) -> Moody:
    """BatchNorm in train mode, another frozen in eval mode, one weight frozen, some gradients there and some not."""
    with kept_global_rng(seed=Seed(0)):
        model = Moody(boom_at).train()
    model.frozen_norm.eval()
    model.conv.bias.requires_grad_(False)  # type: ignore[union-attr]
    model.conv.weight.grad = torch.full_like(model.conv.weight, 3.0)
    model.head.weight.grad = torch.zeros_like(model.head.weight)
    return model


def state(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a user could notice."""
    kept: dict[str, Any] = {f"mode {n}": m.training for n, m in model.named_modules()}
    kept |= {f"hooks {n}": (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()}
    for name, p in model.named_parameters():
        kept |= {f"weight {name}": p.detach().clone(), f"requires_grad {name}": p.requires_grad, f"id {name}": id(p)}
        kept[f"grad {name}"] = None if p.grad is None else p.grad.clone()
    kept |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    return kept


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

    return [
        k for k in before.keys() | after.keys() if k not in before or k not in after or not same(before[k], after[k])
    ]


def run(what: str, model: nn.Module, x: Tensor, y: Tensor) -> None:
    if what == "evaluate":
        evaluate(model, x, y, Linf(0.1), attacks=["pgd-3", "kl-pgd-3", "mt-2", "fgsm"], batch_size=4)
    else:
        attack(what, model, x, y, Linf(0.1), **QUICK.get(what, {}))


@pytest.mark.parametrize("boom_at", [None, 1, 2])
@pytest.mark.parametrize("what", [*BOUNDED, "evaluate"])
def test_the_model_comes_back_as_it_was(what: str, boom_at: int | None) -> None:
    if (what, boom_at) == ("fgsm", 2):
        pytest.skip("fgsm makes one pass")
    model = moody(boom_at)
    gen = Seed(1).generator()
    x, y = torch.rand(10, 1, 4, 4, generator=gen), torch.randint(3, (10,), generator=gen)
    before, rng = state(model), torch.get_rng_state()
    if boom_at is None:
        run(what, model, x, y)
    else:
        with pytest.raises((Boom, ModelError)) as caught:
            run(what, model, x, y)
        assert isinstance(caught.value, Boom) or isinstance(caught.value.__cause__, Boom)
    assert model.count >= (boom_at or 1)
    assert differences(before, state(model)) == []
    assert torch.equal(torch.get_rng_state(), rng)


def test_the_check_would_notice_a_change() -> None:
    """The comparison above must be able to fail in every kind of state."""
    changes: list[tuple[str, Callable[[Moody], object]]] = [
        ("mode norm", lambda m: m.norm.eval()),
        ("buffer norm.running_mean", lambda m: m.norm.running_mean.add_(1)),  # type: ignore[union-attr]
        ("requires_grad head.bias", lambda m: m.head.bias.requires_grad_(False)),
        ("weight head.bias", lambda m: m.head.bias.data.add_(1)),
        ("grad conv.weight", lambda m: m.conv.weight.grad.add_(1)),  # type: ignore[union-attr]
        ("grad norm.bias", lambda m: setattr(m.norm.bias, "grad", torch.zeros(4))),
        ("hooks head", lambda m: m.head.register_forward_hook(lambda *_: None)),
    ]
    for key, change in changes:
        model = moody(None)
        before = state(model)
        change(model)
        assert differences(before, state(model)) == [key]


def test_attacks_see_the_model_in_eval_mode() -> None:
    seen: list[bool] = []
    model = moody(None)
    model.norm.register_forward_hook(lambda m, _, __: seen.append(m.training))
    x, y = torch.rand(4, 1, 4, 4), torch.zeros(4, dtype=torch.int64)
    attack("pgd", model, x, y, Linf(0.1), steps=3)
    assert seen == [False] * 3
