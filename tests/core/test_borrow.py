"""What is borrowed from a model comes back exactly: modes, buffers, requires_grad, weights; also after an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from merging import Merging
from torch import Tensor, nn

from flatrock.core.borrow import borrowed, frozen, home, kept_buffers, mode, nudged, placed
from flatrock.core.rng import Seed


class Boom(Exception):
    """Raised by the tests inside a borrowed block."""


@contextmanager
def leaving(how: str) -> Iterator[None]:
    """Run a block to its end, or expect it to end by an error."""
    if how == "error":
        with pytest.raises(Boom):
            yield
    else:
        yield


def net() -> nn.Sequential:
    """A network in train mode whose first BatchNorm the user froze."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm2d(4))
    model.train()
    model[1].eval()
    return model


def modes(model: nn.Module) -> list[bool]:
    return [m.training for m in model.modules()]


def end(how: str) -> None:
    if how == "error":
        raise Boom


@pytest.mark.parametrize("how", ["normal", "error"])
@pytest.mark.parametrize("training", [True, False])
def test_mode_is_given_back_per_module(how: str, training: bool) -> None:
    model = net()
    before = modes(model)
    assert len(set(before)) == 2
    with leaving(how), mode(model, training=training):
        assert modes(model) == [training] * len(before)
        end(how)
    assert modes(model) == before


@pytest.mark.parametrize("how", ["normal", "error"])
@pytest.mark.parametrize("training", [True, False])
def test_a_module_with_a_mode_of_its_own_is_asked_to_go_back(how: str, training: bool) -> None:
    model = nn.Sequential(Merging(), nn.Sequential(Merging())).train()
    model[1].eval()
    before = [p.clone() for p in model.parameters()]
    with leaving(how), mode(model, training=training):
        assert [m.merged for m in model.modules() if isinstance(m, Merging)] == [not training] * 2
        end(how)
    assert [m.merged for m in model.modules() if isinstance(m, Merging)] == [False, True]
    assert modes(model) == [True, True, False, False]
    for kept, now in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(now, kept)


class Stuck(nn.Module):
    """A module that does not go back."""

    def train(self, mode: bool = True) -> Stuck:
        if mode and not self.training:
            raise RuntimeError("stuck")
        return super().train(mode)


def test_modes_come_back_where_a_module_refuses_to() -> None:
    model = nn.Sequential(nn.Dropout(), Stuck(), nn.Dropout())
    with pytest.raises(RuntimeError, match="stuck"), mode(model, training=False):
        assert not any(modes(model))
    assert all(modes(model))


@pytest.mark.parametrize("how", ["normal", "error"])
def test_kept_buffers_undoes_batchnorm_ticks(how: str) -> None:
    model = net()
    before = [b.clone() for b in model.buffers()]
    held = list(model.buffers())
    with leaving(how), kept_buffers(model):
        model(torch.rand(8, 1, 6, 6))
        assert not all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))
        end(how)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))
    assert all(a is b for a, b in zip(model.buffers(), held, strict=True))


class Counter(nn.Module):
    """Counts its calls in a buffer that it replaces instead of changing in place; TorchScript reads no annotation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x


@pytest.mark.parametrize("how", ["normal", "error"])
def test_kept_buffers_undoes_a_replaced_buffer(how: str) -> None:
    model = nn.Sequential(Counter(), nn.Flatten())
    with leaving(how), kept_buffers(model):
        model(torch.rand(2, 3))
        end(how)
    assert float(next(model.buffers())) == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["normal", "error"])
def test_kept_buffers_undoes_what_torchscript_did(how: str) -> None:
    model = torch.jit.script(nn.Sequential(Counter(), nn.BatchNorm1d(3)).train())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with leaving(how), kept_buffers(model):
        model(torch.rand(2, 3))
        assert float(model.state_dict()["0.calls"]) == 1
        end(how)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("how", ["normal", "error"])
def test_frozen_gives_back_each_requires_grad_and_leaves_grad_alone(how: str) -> None:
    model = net()
    model[0].bias.requires_grad_(False)
    model[0].weight.grad = torch.full_like(model[0].weight, 7.0)
    before = [p.requires_grad for p in model.parameters()]
    with leaving(how), frozen(model):
        assert not any(p.requires_grad for p in model.parameters())
        end(how)
    assert [p.requires_grad for p in model.parameters()] == before
    assert (model[0].weight.grad == 7).all()
    assert model[1].weight.grad is None


@pytest.mark.parametrize("how", ["normal", "error"])
def test_nudged_moves_the_named_weights_and_restores_every_bit(how: str) -> None:
    model = net()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    gen = Seed(0).generator()
    shift = {n: torch.randn(p.shape, generator=gen) / 3 for n, p in before.items() if n != "0.bias"}
    with leaving(how), nudged(model, shift):
        for name, p in model.named_parameters():
            expected = before[name] + shift[name] if name in shift else before[name]
            assert torch.equal(p, expected)
        end(how)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_nudged_by_subtraction_would_not_have_been_exact() -> None:
    """w + v - v loses bits; this is why the old values are copied back."""
    w, v = torch.tensor([0.1]), torch.tensor([1e3])
    assert not torch.equal(w + v - v, w)
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(w)
    with nudged(model, {"weight": v[None]}):
        pass
    assert torch.equal(model.weight.detach(), w[None])


def test_nudged_restores_when_a_later_shift_does_not_fit() -> None:
    model = nn.Linear(2, 3)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    shift = {"weight": torch.ones(3, 2), "bias": torch.ones(5)}
    with pytest.raises(RuntimeError), nudged(model, shift):
        pass
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_nudged_keeps_gradients_flowing_to_the_same_parameter() -> None:
    model = nn.Linear(2, 1, bias=False)
    with nudged(model, {"weight": torch.ones(1, 2)}):
        model(torch.tensor([[2.0, 3.0]])).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2, 3]]


@pytest.mark.parametrize("how", ["normal", "error"])
def test_borrowed_gives_everything_back(how: str) -> None:
    model = net()
    seen = (modes(model), [p.requires_grad for p in model.parameters()])
    buffers = [b.clone() for b in model.buffers()]
    rng = torch.get_rng_state()
    with leaving(how), borrowed(model, "cpu"):
        assert not any(modes(model))
        assert not any(p.requires_grad for p in model.parameters())
        torch.rand(5)
        model.train()(torch.rand(8, 1, 6, 6))
        end(how)
    assert seen == (modes(model), [p.requires_grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("lend", [lambda m: mode(m, training=False), kept_buffers, frozen, lambda m: nudged(m, {})])
def test_a_model_without_tensors_can_be_borrowed(lend: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    model = nn.Flatten()
    with lend(model):
        model(torch.rand(2, 3, 4))
    assert model.training


def test_nudged_restores_a_parameter_that_got_other_data_inside() -> None:
    model = nn.Linear(2, 2)
    before, shift = model.weight.detach().clone(), {"weight": torch.ones(2, 2)}
    with nudged(model, shift):
        model.weight.data = model.weight.data - 0.25
    assert torch.equal(model.weight, before)
    with nudged(model, shift, keep_change=True):
        model.weight.data = model.weight.data - 0.25
    assert torch.allclose(model.weight, before - 0.25, atol=1e-6)


def test_a_shift_with_a_graph_of_its_own_is_not_recorded() -> None:
    model, delta = nn.Linear(2, 2), torch.ones(2, 2, requires_grad=True)
    with nudged(model, {"weight": 2 * delta}):
        assert model.weight.is_leaf
        assert model.weight.grad_fn is None


def test_nudged_gives_back_after_an_error_whatever_was_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error inside, and one while the change is carried over."""
    model = net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    shift = {name: 0.1 * torch.ones_like(p) for name, p in model.named_parameters()}

    def step(error: type[Exception] | None) -> None:
        with nudged(model, shift, keep_change=True):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)
            if error is not None:
                raise error

    def fails(*_: object) -> None:
        raise MemoryError

    with pytest.raises(KeyError):
        step(KeyError)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(torch, "_foreach_add", fails)
        step(None)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    step(None)
    for name, p in model.named_parameters():
        assert torch.allclose(p, 2 * before[name] + 0.1, atol=1e-6), name


class Travelling(nn.Linear):
    """Remembers where it was sent."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.sent: list[str] = []

    def to(self, *args: object, **kwargs: object) -> Travelling:
        self.sent.append(str(args[0]))
        return self


@pytest.mark.parametrize("how", ["end", "error"])
def test_a_model_placed_elsewhere_is_brought_home(how: str) -> None:
    model = Travelling()
    assert home(model) == home(nn.Flatten()) == torch.device("cpu")
    with leaving(how), placed(model, torch.device("cuda:3")):
        assert model.sent == ["cuda:3"]
        if how == "error":
            raise Boom
    assert model.sent == ["cuda:3", "cpu"]
