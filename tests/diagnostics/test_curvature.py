"""The whole measurement: what it leaves untouched, what it counts, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from curvature_cases import conv_net, dense_net, samples
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, ModelError, ThreatError
from flatrock.core.rng import Seed
from flatrock.diagnostics import hessian as hessian_module
from flatrock.diagnostics.curvature import TOO_MANY, Curvature, Settings, curvature

QUICK = Settings(trace="hutch++", probes=2, runs=1, steps=4, top=2, awp_steps=2)


class Huge(nn.Module):
    """Weights whose squared norm is no number, and logits that hardly feel them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3, bias=False).double()
        with torch.no_grad():
            self.fc.weight.fill_(1e200)

    def forward(self, x: Tensor) -> Tensor:
        return 1e-200 * self.fc(x)


class Listener:
    def __init__(self) -> None:
        self.total = self.done = 0
        self.notes: set[str] = set()
        self.ended = False

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.task, self.total = task, total

    def advance(self, units: int, note: str = "") -> None:
        self.done += units
        self.notes.add(note.split(" ")[0])

    def end(self) -> None:
        self.ended = True

    def say(self, text: str) -> None:
        raise AssertionError(text)


@pytest.mark.parametrize("trace", ["exact", "hutch++", "hutchinson"])
def test_the_model_comes_back_bit_by_bit(trace: str) -> None:
    net = conv_net().train()
    net[1].eval()  # frozen by the user
    for p in net.parameters():
        p.grad = torch.full_like(p, 7.0)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    modes = [m.training for m in net.modules()]
    state = torch.get_rng_state()
    x, y = samples((1, 6, 6), 4)
    copy = x.clone()
    curvature(net, x, y, beta=24, settings=replace(QUICK, trace=trace), attack=lambda model: (x + 0.01).clamp(0, 1))
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert [m.training for m in net.modules()] == modes
    assert all(p.requires_grad and bool((p.grad == 7).all()) for p in net.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, copy)


def test_the_model_comes_back_after_an_error_too() -> None:
    net = dense_net()
    before = [p.detach().clone() for p in net.parameters()]
    x, y = samples((3,), 3)

    def broken(model: nn.Module) -> Tensor:
        raise RuntimeError("no attack")

    with pytest.raises(RuntimeError, match="no attack"):
        curvature(net, x, y, beta=24, settings=QUICK, attack=broken)
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    assert net.training


@pytest.mark.parametrize("trace", ["exact", "hutch++", "hutchinson"])
@pytest.mark.parametrize("layers", [True, False])
def test_progress_is_announced_and_made(trace: str, layers: bool) -> None:
    listener = Listener()
    x, y = samples((3,), 3)
    settings = replace(QUICK, trace=trace, layers=layers)
    found = curvature(
        dense_net(), x, y, beta=24, settings=settings, batch_size=7, task="net, clean loss", progress=listener
    )
    assert listener.done == listener.total == found.products * len(x)
    assert listener.ended
    assert listener.task == "net, clean loss"
    assert "largest" in listener.notes
    assert list(found.layers) == (["0", "2", "4"] if layers else [])


def test_numbers_depend_on_the_seed_alone() -> None:
    x, y = samples((3,), 3)
    one, two, other = (
        curvature(dense_net(), x, y, beta=24, settings=QUICK, seed=Seed(s), batch_size=b)
        for s, b in ((1, 24), (1, 5), (2, 24))
    )
    assert one.whole.trace.value == pytest.approx(two.whole.trace.value, rel=1e-12)
    assert one.spectrum.nodes == pytest.approx(two.spectrum.nodes, rel=1e-9)
    assert one.whole.trace != other.whole.trace


def test_frozen_parameters_are_held_fixed() -> None:
    net = dense_net()
    net[0].requires_grad_(False)
    x, y = samples((3,), 3)
    found = curvature(net, x, y, beta=24, settings=replace(QUICK, trace="exact"))
    assert list(found.layers) == ["2", "4"]
    assert found.whole.count == 58
    assert not net[0].weight.requires_grad


def test_small_networks_are_exact_and_large_ones_refuse_to_be() -> None:
    settings = Settings()
    assert settings.method(10_602) == "exact"
    assert settings.method(24_058) == "hutch++"
    assert Settings(trace="hutchinson").method(10) == "hutchinson"
    with pytest.raises(ConfigError, match=r"one product per parameter, too many for 100,001 .*use --trace hutch\+\+"):
        Settings(trace="exact").method(TOO_MANY + 1)


def test_pac_bayes_has_its_logarithm_where_the_trace_is_exact() -> None:
    x, y = samples((3,), 3)
    exact = curvature(dense_net(), x, y, beta=24, settings=replace(QUICK, trace="exact"))
    estimated = curvature(dense_net(), x, y, beta=24, settings=QUICK)
    assert exact.pac_bayes.logarithm is not None
    assert 0 < exact.pac_bayes.logarithm < exact.pac_bayes.trace.value
    assert estimated.pac_bayes.logarithm is None
    assert exact.pac_bayes.risk == exact.loss


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"trace": "hutch"}, r"unknown curvature trace 'hutch'; known: .*did you mean 'hutch\+\+'"),
        ({"probes": 1}, "probes must be a whole number >= 2, got 1"),
        ({"runs": 0}, "runs must be a whole number >= 1, got 0"),
        ({"steps": 8}, "8 Lanczos steps cannot give 5 eigenvalues at each end"),
        ({"gamma": -1}, "gamma must be a number >= 0, got -1"),
        ({"awp_steps": 0}, "awp_steps must be a whole number >= 1, got 0"),
        ({"rho": "x"}, "rho must be a number >= 0, got 'x'"),
        ({"sigma0": 0.0}, "sigma0 must be a number > 0, got 0"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, object], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        Settings(**options)  # type: ignore[arg-type]


def test_a_beta_that_cannot_work_is_said_first() -> None:
    with pytest.raises(ConfigError, match="beta must be a number > 0, got 0"):
        curvature(nn.Flatten(), *samples((3,), 3), beta=0)


def test_models_that_cannot_be_measured() -> None:
    x, y = samples((3,), 3)
    with pytest.raises(ModelError, match="no trainable parameter"):
        curvature(nn.Flatten(), x, y, beta=24)
    broken = dense_net()
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    with pytest.raises(ModelError, match="NaN or infinite logits"):
        curvature(broken, x, y, beta=24)
    with pytest.raises(ModelError, match=r"labels span .* but the model has 3 classes"):
        curvature(dense_net(), x, y + 2, beta=24)


def test_samples_that_cannot_be_measured() -> None:
    x, y = samples((3,), 3)
    net = dense_net()
    with pytest.raises(ThreatError, match="nothing to measure: x has no samples"):
        curvature(net, x[:0], y[:0], beta=24)
    with pytest.raises(ThreatError, match=r"got torch\.uint8 .*divide by 255"):
        curvature(net, (255 * x).to(torch.uint8), y, beta=24)
    with pytest.raises(ModelError, match=r"float32 weights but the inputs are torch\.float64; use model\.to"):
        curvature(dense_net().float(), x, y, beta=24)
    with pytest.raises(ThreatError, match=r"labels must be integers .*argmax"):
        curvature(net, x, nn.functional.one_hot(y, 3), beta=24)
    with pytest.raises(
        ModelError, match=r"the model fails on inputs of shape \(24, 2\), torch.float64 on cpu: RuntimeError"
    ):
        curvature(net, x[:, :2], y, beta=24)
    with pytest.raises(ConfigError, match="batch_size must be a whole number >= 1, got 0"):
        curvature(net, x, y, beta=24, batch_size=0)


# What torch says when the CPU's memory is short; test_smoothing.py sees to it that it does.
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(CPU)], ids=["gpu", "cpu"])
def test_short_memory_halves_the_batches(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    net = dense_net()
    x, y = samples((3,), 3)
    whole = curvature(net, x, y, beta=24, settings=QUICK, batch_size=24)
    sizes = []
    plain = nn.Sequential.forward

    def short(self: nn.Sequential, inputs: Tensor) -> Tensor:
        if len(inputs) > 16:
            raise error
        sizes.append(len(inputs))
        return plain(self, inputs)

    monkeypatch.setattr(hessian_module, "FEW", 8)
    monkeypatch.setattr(nn.Sequential, "forward", short)
    found = curvature(net, x, y, beta=24, settings=QUICK, batch_size=24)
    assert max(sizes) == 12
    assert found.whole.trace.value == pytest.approx(whole.whole.trace.value, rel=1e-10)


def test_short_memory_is_no_fault_of_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = samples((3,), 3)
    error = RuntimeError(CPU)

    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(hessian_module, "check_symmetric", full)
    with pytest.raises(RuntimeError) as caught:
        curvature(dense_net(), x, y, beta=24, settings=QUICK)
    assert caught.value is error


def test_numbers_that_are_not_finite_are_named() -> None:
    x, y = samples((3,), 3)
    with pytest.raises(ModelError, match=r"curvature: pac_bayes .* not finite.*--precision double"):
        curvature(Huge(), x, y, beta=24, settings=QUICK)


def test_steps_too_long_leave_a_record() -> None:
    x, y = samples((3,), 3)
    long = replace(QUICK, gamma=1e30, rho=1e30)
    found = curvature(dense_net().float(), x.float(), y, beta=24, settings=long)
    assert (found.awp.rise, found.sam.rise) == (None, None)
    assert Curvature.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found


@pytest.mark.gpu
@pytest.mark.parametrize("trace", ["exact", "hutch++"])
def test_cuda_gives_what_the_cpu_gives(trace: str) -> None:
    net = conv_net()
    x, y = samples((1, 6, 6), 4)
    settings = replace(QUICK, trace=trace, steps=12)
    here = curvature(net, x, y, beta=24, settings=settings)
    there = curvature(net.cuda(), x.cuda(), y.cuda(), beta=24, settings=settings)
    assert there.whole.trace.value == pytest.approx(here.whole.trace.value, rel=1e-8)
    assert there.whole.spread.value == pytest.approx(here.whole.spread.value, rel=1e-8)
    assert there.spectrum.largest[0][0] == pytest.approx(here.spectrum.largest[0][0], rel=1e-8)
    assert (there.awp.rise, there.sam.rise) == pytest.approx((here.awp.rise, here.sam.rise), rel=1e-8)
