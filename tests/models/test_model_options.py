"""Options of the residual networks: how BatchNorm takes statistics over, and the activation of wide ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.models.catalog import create_model
from flatrock.models.classifier import Classifier
from flatrock.models.fused import fused
from flatrock.models.fused_layers import Affine, FoldedConv
from flatrock.models.joint import Joint, joint
from flatrock.models.layers import activated
from flatrock.models.norm import PromptNorm2d, normalised, usual
from flatrock.models.twin import faithful, probe_inputs

THIN: dict[str, Any] = {"depth": 10, "width": 2}
RESNETS: dict[str, dict[str, Any]] = {
    "preact_resnet18": {},
    "resnet18": {},
    "resnet20": {},
    "wide_resnet": THIN,
}


def made(name: str, **options: Any) -> Classifier:
    return create_model(name, num_classes=4, **{**RESNETS[name], **options}).double().train()


def draws(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=Seed(seed).generator())


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", RESNETS)
def test_momentum_reaches_every_batch_norm(name: str) -> None:
    assert {m.momentum for m in norms(made(name))} == {0.1}
    slow, prompt = made(name, bn_momentum=0.01), made(name, bn_momentum=0.01, bn_first=2)
    assert all(type(m) is nn.BatchNorm2d and m.momentum == 0.01 for m in norms(slow))
    assert all(isinstance(m, PromptNorm2d) and (m.momentum, m.first) == (0.01, 2) for m in norms(prompt))


@pytest.mark.parametrize("name", RESNETS)
def test_options_change_neither_weights_nor_their_names(name: str) -> None:
    plain = made(name).state_dict()
    options: dict[str, Any] = {"bn_momentum": 0.01, "bn_first": 2}
    other = made(name, **options, **({"activation": "silu"} if name == "wide_resnet" else {})).state_dict()
    assert plain.keys() == other.keys()
    assert all(torch.equal(tensor, other[key]) for key, tensor in plain.items())


@pytest.mark.parametrize("first", [1, 2, 3])
def test_first_batches_count_in_full_then_the_momentum_does(first: int) -> None:
    """By hand: momentum 1 set from outside for these batches, as the code of Gowal et al. sets it for a step."""
    norm, by_hand = PromptNorm2d(3, momentum=0.01, first=first).double(), nn.BatchNorm2d(3).double()
    for i in range(5):
        x = 3 * draws(4, 3, 5, 5, seed=i) + i
        by_hand.momentum = 1.0 if i < first else 0.01
        leaf, again = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, true = norm(leaf), by_hand(again)
        assert torch.equal(out, true)
        weights = draws(4, 3, 5, 5, seed=9)
        (grad,), (exact,) = (torch.autograd.grad((o * weights).sum(), t) for o, t in ((out, leaf), (true, again)))
        assert torch.equal(grad, exact)
        for got, wanted in zip(norm.buffers(), by_hand.buffers(), strict=True):
            assert torch.allclose(got.double(), wanted.double(), rtol=1e-14, atol=1e-14)


def test_two_passes_before_one_backward() -> None:
    """Statistics that move on must not be among what the backward pass of an earlier batch reads."""
    norm = PromptNorm2d(3, momentum=0.01, first=2).double()
    x = draws(4, 3, 5, 5).requires_grad_()
    (norm(x).square().sum() + (norm(x) * x).sum()).backward()
    assert x.grad is not None


def test_a_plain_mean_over_batches_stays_one() -> None:
    """What re-estimated statistics of averaged weights are made by: momentum None."""
    norm, true = PromptNorm2d(3, momentum=0.01, first=2).double(), nn.BatchNorm2d(3, momentum=None).double()
    norm.momentum = None
    for i in range(4):
        x = draws(4, 3, 5, 5, seed=i)
        assert torch.equal(norm(x), true(x))
    assert all(map(torch.equal, norm.buffers(), true.buffers()))


@pytest.mark.parametrize("begun", [0, 1, 2, 7])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("relu", [True, False])
def test_several_batches_at_once_leave_the_same_statistics(begun: int, parts: int, relu: bool) -> None:
    norm = PromptNorm2d(4, momentum=0.01, first=2).double()
    assert usual(norm)
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.fill_(begun)
    alone = copy.deepcopy(norm)
    x = 2 * draws(parts * 6, 4, 5, 3) + 1
    true = torch.cat([alone(part) for part in x.chunk(parts)])
    got = normalised(norm, x, parts=parts, relu=relu, kernels=False)
    assert torch.allclose(got, F.relu(true) if relu else true, rtol=1e-10, atol=1e-10)
    for mine, exact in zip(norm.buffers(), alone.buffers(), strict=True):
        assert torch.allclose(mine.double(), exact.double(), rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("begun", [0, 1, 7])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_kernels_leave_the_same_statistics(begun: int, parts: int) -> None:
    norm = PromptNorm2d(64, momentum=0.01, first=2).cuda()
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.fill_(begun)
    alone = copy.deepcopy(norm).double()
    x = (2 * draws(parts * 16, 64, 8, 8) + 1).float().cuda().contiguous(memory_format=torch.channels_last)
    for part in x.double().chunk(parts):
        alone(part)
    normalised(norm, x, parts=parts, relu=True, kernels=True)
    for mine, exact in zip(norm.buffers(), alone.buffers(), strict=True):
        assert torch.allclose(mine.double(), exact.double(), rtol=1e-5, atol=1e-5)


def test_nobody_waits_for_the_counter() -> None:
    """On the meta device there are no numbers to wait for; reading one fails."""
    with torch.device("meta"):
        model = create_model("wide_resnet", **THIN, bn_momentum=0.01, bn_first=2).train()
    inputs = [torch.empty(6, 3, 32, 32, device="meta") for _ in range(2)]
    assert model(inputs[0]).shape == (6, 10)
    assert [z.shape for z in Joint(model, 2).passes(lambda x: (model(x),), inputs)] == [(6, 10)] * 2


OPTIONS: list[dict[str, Any]] = [
    {"bn_momentum": 0.01},
    {"bn_momentum": 0.01, "bn_first": 2},
    {"activation": "silu"},
    {"activation": "silu", "bn_momentum": 0.01, "bn_first": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_pass_is_several(options: dict[str, Any]) -> None:
    """Logits, gradients and running statistics of what the fast engine makes of two passes."""
    model = made("wide_resnet", **options)
    inputs = list(draws(2, 6, 3, 32, 32))
    alone = copy.deepcopy(model)
    way = joint(model, inputs)
    assert way is not None
    true, got = [alone(x) for x in inputs], way.passes(lambda x: (model(x),), inputs)
    for mine, exact in zip(got, true, strict=True):
        assert torch.allclose(mine, exact, rtol=1e-9, atol=1e-9)
    for loss in (got[0].square().sum() + got[1].sum(), true[0].square().sum() + true[1].sum()):
        loss.backward()
    largest = max(float(p.grad.abs().max()) for p in alone.parameters() if p.grad is not None)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.allclose(p.grad, q.grad, rtol=1e-7, atol=1e-12 * largest)
    for (label, mine), exact in zip(model.named_buffers(), alone.buffers(), strict=True):
        assert torch.allclose(mine.double(), exact.double(), rtol=1e-10, atol=1e-10), label


def test_compiled_passes_leave_the_same_statistics() -> None:
    model = made("wide_resnet", bn_momentum=0.01, bn_first=3)
    inputs = list(draws(2, 6, 3, 32, 32))
    alone = copy.deepcopy(model)
    way = joint(model, inputs)
    assert way is not None
    compiled = torch.compile(lambda x: (model(x),), backend="aot_eager", dynamic=False)
    for _ in range(3):
        way.passes(compiled, inputs)
        for x in inputs:
            alone(x)
    for mine, exact in zip(model.buffers(), alone.buffers(), strict=True):
        assert torch.allclose(mine.double(), exact.double(), rtol=1e-10, atol=1e-10)


def test_a_silu_is_not_taken_for_the_relu_a_batch_norm_knows() -> None:
    norm = nn.BatchNorm2d(3).double()
    x = draws(4, 3, 5, 5) - 0.5
    true = F.silu(copy.deepcopy(norm)(x))
    (got,) = Joint(norm, 1).passes(lambda whole: (activated(norm, whole, "silu"),), [x])
    assert torch.allclose(got, true, rtol=1e-12, atol=1e-12)
    assert float(got.detach().min()) < 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attacks_query_the_same_function(options: dict[str, Any]) -> None:
    """The fused copy in eval mode: its BatchNorms are fused, with a ReLU behind them only where there is one."""
    model = made("wide_resnet", **options)
    for _ in range(3):
        model(draws(6, 3, 32, 32))
    model.eval()
    relu = options.get("activation") != "silu"
    inner, plain = fused(copy.deepcopy(model))
    assert plain
    layers = [m for m in inner.modules() if isinstance(m, Affine)]
    assert [m.relu for m in layers] == [relu] * len(norms(model))
    assert any(isinstance(m, FoldedConv) for m in inner.modules()) == relu
    twin = faithful(model, probe_inputs(model), dtype=torch.float64)
    assert twin.plain
    x = draws(5, 3, 32, 32)
    leaf, again = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, true = twin(leaf), model(again)
    assert torch.allclose(got.double(), true, rtol=1e-5, atol=1e-6)
    (grad,), (exact,) = (torch.autograd.grad(z.square().sum(), t) for z, t in ((got, leaf), (true, again)))
    assert float((grad - exact).abs().max()) <= 1e-5 * float(exact.abs().max())


def test_silu_is_the_only_difference() -> None:
    """A block by hand, and the parameter counts of WRN-28-10."""
    model = made("wide_resnet", activation="silu").eval()
    x = draws(2, 3, 32, 32)
    out = model.get_submodule("conv")(x)
    blocks: Any = model.get_submodule("blocks")
    for block in blocks:
        active = F.silu(block.bn1(out))
        inside = block.conv2(F.silu(block.bn2(block.conv1(active))))
        out = inside + (out if block.shortcut is None else block.shortcut(active))
    features = F.silu(model.get_submodule("bn")(out)).mean((2, 3))
    assert torch.allclose(model(x), model.head(features), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(x), made("wide_resnet").eval()(x), rtol=1e-3)
    with torch.device("meta"):
        assert parameters(create_model("wide_resnet28_10", activation="silu")) == 36_479_194


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"activation": "gelu"}, "unknown wide_resnet activation 'gelu'; known: relu, silu"),
        ({"bn_momentum": 0}, "bn_momentum must be above 0, got 0"),
        ({"bn_momentum": 1.5}, r"bn_momentum must lie in \[0, 1\]"),
        ({"bn_first": -1}, "bn_first must be a whole number >= 0, got -1"),
        ({"bn_first": 1.5}, "bn_first must be a whole number >= 0, got 1.5"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        create_model("wide_resnet", **THIN, **options)
