"""The twin attacks query while training: follows the weights, agrees with the network, gives input gradients only."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatrock.attacks.gradient import GradientAttack
from flatrock.core.borrow import full_precision, nudged
from flatrock.core.errors import ModelError
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import Linf
from flatrock.flatness.tensors import Noise, chosen
from flatrock.models.catalog import create_model
from flatrock.models.classifier import Classifier
from flatrock.models.fused_layers import FoldedConv
from flatrock.models.sizes import rounded
from flatrock.models.twin import Twin, faithful, probe_inputs

NETWORKS = ["preact_resnet18", "resnet20", "digits_cnn", "moons_mlp"]


@pytest.fixture
def without_tf32() -> Iterator[None]:
    with full_precision("cuda"):
        yield


def drifted(model: Classifier, seed: int) -> None:
    """Change every weight and statistic in place, as training does."""
    generator = Seed(seed).generator()
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device)
            p.add_(0.1 * p.abs().mean() * noise)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                like = module.running_mean
                like.copy_(torch.randn(like.shape, generator=generator))
                module.running_var.copy_(0.5 + 1.5 * torch.rand(like.shape, generator=generator))


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(model(leaf).square().sum(), leaf)
    return grad


@pytest.mark.parametrize("name", NETWORKS)
def test_follows_the_network(name: str) -> None:
    model = create_model(name, num_classes=5, normalize=None).double().eval()
    x = torch.rand(3, *model.input_shape, dtype=torch.float64, generator=Seed(1).generator())
    twin = faithful(model, probe_inputs(model), dtype=torch.float64)
    assert twin.plain
    folded = any(isinstance(m, FoldedConv) for m in twin.modules())
    assert folded == (name != "moons_mlp")
    for seed in (1, 2):
        drifted(model, seed)
        twin.follow()
        with torch.no_grad():
            true, got = model(x), twin(x)
        assert got.dtype == torch.float32
        assert float((got - true).abs().max()) <= 1e-6 * float(true.abs().max())
        true_grad = gradient(model, x)
        assert float((gradient(twin, x) - true_grad).abs().max()) <= 1e-5 * float(true_grad.abs().max())


def test_follows_a_network_whose_tensors_were_replaced() -> None:
    model = create_model("digits_cnn", num_classes=10).eval()
    twin = Twin(model, dtype=torch.float32, gradients=True)
    drifted(model, 1)
    model.double().float()  # new tensors in the old places
    drifted(model, 2)
    twin.follow()
    x = torch.rand(3, *model.input_shape)
    assert float((twin(x) - model(x)).detach().abs().max()) < 1e-4


def test_stays_behind_until_told() -> None:
    model = create_model("digits_cnn", num_classes=10).eval()
    twin = Twin(model, dtype=torch.float32, gradients=True)
    x = torch.rand(3, *model.input_shape)
    before = twin(x)
    drifted(model, 1)
    assert torch.equal(twin(x), before)
    twin.follow()
    assert not torch.equal(twin(x), before)


def test_leaves_the_network_alone() -> None:
    model = create_model("digits_cnn", num_classes=10, normalize="centered").train()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    twin = Twin(model)
    twin.follow()
    gradient(twin, torch.rand(4, *model.input_shape))
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.training
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(p.requires_grad for p in twin.parameters())
    assert {p.dtype for p in twin.parameters()} == {torch.float16}
    assert not any(module is model for module in twin.modules())


class Aliasing(Classifier):
    """A trace of it is another function."""

    def __init__(self) -> None:
        super().__init__(input_shape=(4,), num_classes=3)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def embed(self, x: Tensor) -> Tensor:
        first: Tensor = self.norm(x)
        second = first
        first += 5 * x.flip(1)
        return F.relu(second)


def test_a_network_that_a_trace_gets_wrong_is_copied_as_it_is() -> None:
    with kept_global_rng(seed=Seed(1)):
        model = Aliasing().double().eval()
    drifted(model, 1)
    twin = faithful(model, probe_inputs(model), dtype=torch.float64)
    drifted(model, 2)
    twin.follow()
    x = torch.rand(5, 4, dtype=torch.float64)
    assert not twin.plain
    assert float((twin(x) - model(x)).detach().abs().max()) < 1e-6


class Overwritten(nn.Module):
    """The sum is changed in place before the BatchNorm reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out = x - 0.7 + x.flip(1)
        F.relu(out, inplace=True)
        return self.norm(out)  # type: ignore[no-any-return]


class RowsTogether(nn.Module):
    """What it says of a row depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x - x.mean(0))  # type: ignore[no-any-return]


class Flat(nn.Module):
    """Reads its maps by view, which channels last do not allow; its shift is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4 * 4, 3)
        self.shift = torch.tensor(0.25)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x - self.shift)
        return self.head(x.view(x.shape[0], 16))  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("make", "shape", "plain"),
    [(Overwritten, (4,), False), (Flat, (3, 4, 4), True)],
    ids=["overwritten", "flat"],
)
def test_odd_networks_have_faithful_twins(
    make: type[nn.Module], shape: tuple[int, ...], plain: bool, device: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with kept_global_rng(seed=Seed(1)):
        model = make().to(device).eval()
        if isinstance(model, Flat):
            model.shift = model.shift.to(device)
    x = torch.rand(40, *shape, generator=Seed(2).generator()).to(device)
    twin = faithful(model, x)
    assert twin.plain == plain
    with torch.no_grad():
        assert float((twin(x) - model(x)).abs().max()) < 4e-3
    twin.follow()
    assert capfd.readouterr().err == ""


class Glance(nn.Module):
    """Not only its first convolution reads the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)) * x.mean((1, 2, 3))[:, None]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "direct"), [("resnet20", True), ("normalised", False), ("moons_mlp", False), ("glance", False)]
)
def test_inputs_are_cast_where_no_padded_convolution_does(name: str, direct: bool) -> None:
    """In bfloat16: a layer that meets float32 inputs beside such weights would raise."""
    if name == "glance":
        model: nn.Module = Glance().eval()
        x = torch.rand(3, 3, 5, 5, generator=Seed(2).generator())
    else:
        network = create_model("resnet20" if name == "normalised" else name, num_classes=3)
        if name == "normalised":
            network.set_normalization([0.4, 0.5, 0.6], [0.2, 0.3, 0.2])
        model, x = network.eval(), torch.rand(3, *network.input_shape, generator=Seed(2).generator())
    twin = Twin(model, dtype=torch.bfloat16)
    assert twin._direct == direct
    with torch.no_grad():
        true = model(x)
        assert float((twin(x) - true).abs().max()) <= 0.05 * float(true.abs().max()) + 0.02


class Unsettled(nn.Module):
    """A BatchNorm without statistics of its own looks at the batch even in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [RowsTogether, Unsettled])
def test_a_network_whose_rows_mix_has_no_twin(make: type[nn.Module]) -> None:
    """Gradients are resized row by row."""
    with kept_global_rng(seed=Seed(1)):
        model = make().eval()
    with pytest.raises(ModelError, match="depends on the rest of the batch"):
        faithful(model, torch.rand(8, 4, generator=Seed(2).generator()))


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Odd(nn.Module):
    """A network that cannot be traced, or whose trace is not taken."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.norm = kind, nn.Linear(6, 5), nn.BatchNorm1d(5)
        if kind == "hook":
            self.layer.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.layer(x)))
        if self.kind == "constant":
            return x * torch.tensor(2.0)
        if self.kind == "coin":
            return x + 0 * torch.rand(1)
        if self.kind == "branch" and bool(x.sum() > 1e9):
            return -x
        return x


@pytest.mark.parametrize("name", [*NETWORKS, "constant", "coin", "branch", "hook"])
def test_a_twin_is_freed_with_its_last_name(name: str, no_collector: None) -> None:
    """All of it, and what it was made of, at once: the memory of a GPU cannot wait for Python's collector."""
    known = create_model(name, num_classes=10).eval() if name in NETWORKS else None
    model = known or Odd(name).eval()
    x = torch.rand(4, 6) if known is None else probe_inputs(known)[:4]
    before = tensors_alive()
    twin = faithful(model, x)
    assert twin.plain == (known is not None)
    gradient(twin, x)
    assert tensors_alive() > before
    del twin
    assert tensors_alive() == before


def tensors_alive() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def test_an_evaluation_gives_its_twin_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the same answers and gradients; training has one size, which stays."""
    monkeypatch.setattr("flatrock.models.twin.size_for", lambda x: rounded(x.shape[0]))
    model = create_model("digits_cnn", num_classes=10).double().eval()
    seen: list[int] = []
    for gradients in (False, True):
        twin = Twin(model, dtype=torch.float64, gradients=gradients)
        twin.inner.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
        x = torch.rand(5, *model.input_shape, dtype=torch.float64, generator=Seed(1).generator())
        with torch.no_grad():
            assert torch.allclose(twin(x).double(), model(x), rtol=1e-5)
        true = gradient(model, x)
        assert float((gradient(twin, x) - true).abs().max()) <= 1e-5 * float(true.abs().max())
    assert seen == [8, 8, 5, 5]


@pytest.mark.parametrize("samples", [1, 4])
def test_rows_that_mix_are_noticed_in_any_batch(samples: int) -> None:
    """Also in one of a single row: on a GPU it may be filled up."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten()).eval()
    with pytest.raises(ModelError, match="depends on the rest of the batch"):
        faithful(model, torch.rand(samples, 1, 5, 5, generator=Seed(1).generator()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["preact_resnet18", "resnet18"])
def test_replayed_passes_on_a_gpu(name: str, without_tf32: None) -> None:
    """Recorded forward and backward passes follow weights that change, in any order, also for a smaller last batch."""
    model = create_model(name, num_classes=10).eval().cuda()
    drifted(model, 1)
    twin = Twin(model, dtype=torch.float32, gradients=True)
    cosine = nn.CosineSimilarity(dim=1)
    for step in range(30):
        drifted(model, step)
        size = 104 if step % 5 == 4 else 128
        x = torch.rand(size, 3, 32, 32, generator=Seed(step).generator()).cuda()
        twin.follow()
        first, second = x.clone().requires_grad_(True), (0.5 * x).requires_grad_(True)
        one, two = twin(first), twin(second)  # the second pass overwrites what the first left for its gradient
        for leaf, out in ((second, two), (first, one)):
            (grad,) = torch.autograd.grad(out.square().sum(), leaf)
            true = gradient(model, leaf.detach())
            assert float(cosine(grad.flatten(1), true.flatten(1)).min()) > 0.99
    assert len(twin._replay._recorded) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_whole_attack_is_recorded_once(loss: str, without_tf32: None) -> None:
    """Steps replayed are the steps themselves, at weights that change, for a smaller batch and for other labels too."""
    model = create_model("preact_resnet18", num_classes=10).eval().cuda()
    drifted(model, 1)
    fast, slow = Twin(model, dtype=torch.float32, gradients=True), Twin(model, dtype=torch.float32)
    attack = GradientAttack(loss=loss, steps=3, start="uniform")  # near x the KL has no gradient to speak of
    for step in range(5):
        drifted(model, step)
        fast.follow()
        slow.follow()
        size = 104 if step == 3 else 128
        x = torch.rand(size, 3, 32, 32, generator=Seed(step).generator()).cuda()
        y = torch.randint(10, (size,), generator=Seed(step).generator()).cuda()
        gen = Seed(step).child("start").samples(torch.arange(size))
        one, two = (
            attack(_Plain(twin) if plain else twin, x, y, Linf(8 / 255), gen)
            for twin, plain in ((fast, False), (slow, True))
        )
        # Rounding turns the sign of gradients that are almost 0, in few places.
        assert float(((one - two).abs() > 1e-6).float().mean()) < 0.01
    assert len(fast._replay._wholes) == 1
    assert not fast._replay._recorded


class _Plain(nn.Module):
    """A network that records nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]


class Shared(nn.Module):
    """Two convolutions with one weight, and a BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.a(x))).mean((2, 3))  # type: ignore[no-any-return]


class SharedFolded(Shared):
    """The same where BatchNorms become part of convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.a(x.repeat(1, 3, 1, 1))))
        return F.relu(self.norm(self.b(x))).mean((2, 3))


@pytest.mark.parametrize(("kind", "width"), [(Shared, 3), (SharedFolded, 9)])
def test_follows_weights_plus_a_shift(kind: type[Shared], width: int) -> None:
    """Whatever it is on: shared weights, biases, BatchNorm parameters; the network stays where it is."""
    with kept_global_rng(seed=Seed(1)):
        model = kind(width).double().eval()
    drifted(model, 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = torch.rand(5, 3, 6, 6, dtype=torch.float64, generator=Seed(2).generator())
    twin = faithful(model, x, dtype=torch.float64)
    assert twin.plain
    assert sum(isinstance(m, FoldedConv) for m in twin.modules()) == (2 if kind is SharedFolded else 0)
    shift = {name: 0.1 * torch.ones_like(p) for name, p in model.named_parameters()}
    assert list(shift) == ["a.weight", "a.bias", "b.bias", "norm.weight", "norm.bias"]
    for some in (shift, {"a.weight": shift["a.weight"]}, {"norm.bias": shift["norm.bias"]}, {}):
        twin.follow(some)
        with nudged(model, some), torch.no_grad():
            true = model(x)
            assert float((twin(x) - true).abs().max()) < 1e-6 * float(true.abs().max())
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class Counted(Noise):
    """RAT's noise, drawn when asked for; counts how often each tensor was."""

    asked: Counter[str]

    def __getitem__(self, name: str) -> Tensor:
        self.asked[name] += 1
        return super().__getitem__(name)


@pytest.mark.parametrize("name", ["preact_resnet18", "digits_cnn"])
def test_a_shift_that_is_drawn_when_asked_for_is_drawn_once(name: str) -> None:
    """Millions of numbers: neither looking for a name nor sorting out what is left may draw them."""
    model = create_model(name, num_classes=10, normalize=None).eval()
    names = chosen(model, "weights")
    shift = Counted(names, 0.01, Seed(1))
    shift.asked = Counter()
    twin = faithful(model, probe_inputs(model))
    twin.follow(shift)
    assert shift.asked == Counter(list(names))
