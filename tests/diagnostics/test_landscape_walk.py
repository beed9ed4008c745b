"""Walks through weight space: the oracles of a landscape, exact return, memory, resumption point by point."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.attacks.craft import craft
from flatrock.attacks.gradient import GradientAttack
from flatrock.core.borrow import borrowed
from flatrock.core.errors import ConfigError, ModelError, StateError, ThreatError
from flatrock.core.progress import Silent
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import Linf
from flatrock.diagnostics.grid import Axis
from flatrock.diagnostics.landscape import combined, filter_direction, movable, moved
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.probe import HalfPass, Probe
from flatrock.diagnostics.weight_landscape import MIDDLE, draw_directions, place, walk_weights, weight_points
from flatrock.models.catalog import create_model

ATTACK = GradientAttack(steps=3, step_size=0.02)
THREAT = Linf(0.05)
AXIS = Axis(points=5, span=0.5)


def inputs(n: int = 24) -> tuple[Tensor, Tensor]:
    gen = Seed(5).generator()
    return torch.rand(n, 1, 8, 8, generator=gen), torch.randint(10, (n,), generator=gen)


def probe_of(model: nn.Module, *, batch_size: int = 256, half: bool = False, n: int = 24) -> Probe:
    x, y = inputs(n)
    ids = torch.arange(n)
    return Probe(model, x, y, ids=ids, threat=THREAT, attack=ATTACK, seed=Seed(9), batch_size=batch_size, half=half)


def walk(model: nn.Module, probe: Probe, ledger: Ledger, *, count: int = 2, dimensions: int = 1) -> None:
    walk_weights(model, probe, AXIS, count=count, dimensions=dimensions, seed=Seed(1), ledger=ledger, progress=Silent())


def ledger() -> Ledger:
    return Ledger(None, {}, resume=False)


def test_samples_that_cannot_be_probed() -> None:
    with pytest.raises(ThreatError, match="nothing to measure: x has no samples"):
        probe_of(nn.Flatten(), n=0)
    model = nn.Linear(5, 10).eval()
    with pytest.raises(ModelError, match="the model fails on inputs of shape"):
        probe_of(model).check()


def test_an_axis_is_symmetric_and_holds_zero() -> None:
    values = Axis(points=21, span=0.7).values
    assert values[10] == 0
    assert [-v for v in reversed(values)] == list(values)
    assert values[0] == -0.7
    assert len(values) == 21


@pytest.mark.parametrize(
    ("points", "span"), [(20, 1.0), (1, 1.0), (2.5, 1.0), (True, 1.0), (10**6 + 1, 1.0), (5, 0.0), (5, float("nan"))]
)
def test_nonsense_grids_are_refused(points: int, span: float) -> None:
    with pytest.raises(ConfigError, match="the grid of a landscape"):
        Axis(points=points, span=span)


def test_every_fault_of_a_grid_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        Axis(points=4, span=-1)
    assert len(caught.value.faults) == 2


def test_each_point_is_the_adversarial_loss_of_the_moved_network() -> None:
    model = create_model("digits_cnn", seed=3).eval()
    found = ledger()
    walk(model, probe_of(model), found)
    assert len(found) == weight_points(AXIS, count=2, dimensions=1) == 9
    x, y = inputs()
    for k, i in ((0, 0), (1, 3)):
        other = create_model("digits_cnn", seed=3).eval()
        direction = filter_direction(other, Seed(1).child("direction", k, 0))
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                if name in direction:
                    parameter.add_(AXIS.values[i] * direction[name])
        x_adv = craft(ATTACK, other, x, y, THREAT, Seed(9).samples(torch.arange(len(x))))
        with torch.no_grad():
            loss = F.cross_entropy(other(x_adv), y, reduction="none").double().mean()
            clean = F.cross_entropy(other(x), y, reduction="none").double().mean()
        point = found.get(place(k, i))
        assert point is not None
        assert point["loss"] == pytest.approx(float(loss), rel=1e-12)
        assert point["clean_loss"] == pytest.approx(float(clean), rel=1e-12)
        assert point["loss"] > point["clean_loss"]


def test_the_middle_is_measured_once_at_the_weights_themselves() -> None:
    model = create_model("digits_cnn", seed=3).eval()
    probe, found = probe_of(model), ledger()
    walk(model, probe, found)
    with borrowed(model, "cpu"):
        assert found.get(MIDDLE) == probe().to_dict()


def test_a_surface_has_the_curve_of_its_first_direction_inside() -> None:
    model = create_model("digits_cnn", seed=3).eval()
    curve, surface = ledger(), ledger()
    walk(model, probe_of(model, n=8), curve, count=1)
    walk(model, probe_of(model, n=8), surface, count=1, dimensions=2)
    assert len(surface) == weight_points(AXIS, count=1, dimensions=2) == 25
    for i in (0, 4):
        inside, alone = surface.get(place(0, i, AXIS.middle)), curve.get(place(0, i))
        assert inside is not None
        assert inside == pytest.approx(alone, rel=1e-6)
    first, second = draw_directions(model, Seed(1), 0, 2, movable(model))
    both = combined([first, second], [0.5, -0.25])
    assert torch.allclose(both["head.weight"], 0.5 * first["head.weight"] - 0.25 * second["head.weight"])


@pytest.mark.parametrize("fails_at", [None, 4])
def test_weights_buffers_modes_and_random_state_come_back(fails_at: int | None) -> None:
    model = create_model("digits_cnn", seed=3).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    grads = [p.requires_grad for p in model.parameters()]
    probe, found = probe_of(model), ledger()
    if fails_at is None:
        walk(model, probe, found)
    else:
        calls = 0

        def broken(moved: nn.Module, *_: object, **__: object) -> Tensor:
            nonlocal calls
            calls += 1
            if calls < fails_at:
                return probe.x
            now = moved.state_dict()
            assert not all(torch.equal(value, before[name]) for name, value in now.items()), "in the middle of a move"
            raise RuntimeError("on purpose")

        probe.attack = broken  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="on purpose"):
            walk(model, probe, found)
        assert len(found) == fails_at - 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert [p.requires_grad for p in model.parameters()] == grads
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_halve_when_memory_is_short_and_the_numbers_stay() -> None:
    model = create_model("digits_cnn", seed=3).eval()
    whole, small = ledger(), ledger()
    walk(model, probe_of(model), whole, count=1)

    def scarce(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if len(args[0]) > 7:
            raise torch.OutOfMemoryError("as if there were no memory")

    probe = probe_of(model)
    handle = model.register_forward_pre_hook(scarce)
    probe.check = lambda: None  # type: ignore[method-assign]
    walk(model, probe, small, count=1)
    handle.remove()
    assert probe.batch_size == 6
    for key in (MIDDLE, place(0, 0), place(0, 4)):
        assert small.get(key) == pytest.approx(whole.get(key), rel=1e-5)


def test_memory_that_holds_no_sample_at_all_is_an_error() -> None:
    model = create_model("digits_cnn", seed=3).eval()

    def none_left(*_: object) -> None:
        raise torch.OutOfMemoryError("as if there were no memory")

    probe = probe_of(model)
    model.register_forward_pre_hook(none_left)
    with pytest.raises(torch.OutOfMemoryError):
        probe()


def test_half_precision_crafts_and_full_precision_judges() -> None:
    model = create_model("digits_cnn", seed=3).eval()
    exact, rough = ledger(), ledger()
    walk(model, probe_of(model), exact, count=1)
    walk(model, probe_of(model, half=True), rough, count=1)
    for key in (MIDDLE, place(0, 4)):
        one, other = exact.get(key), rough.get(key)
        assert one is not None
        assert other is not None
        assert other["clean_loss"] == one["clean_loss"]
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-2)
        assert other["loss"] != one["loss"]


def test_without_attack_the_loss_is_the_clean_one() -> None:
    model = create_model("digits_cnn", seed=3).eval()
    x, y = inputs()
    probe = Probe(model, x, y, ids=torch.arange(24), threat=THREAT, attack=None, seed=Seed(0), batch_size=9, half=False)
    reading = probe()
    with torch.no_grad():
        assert reading.loss == pytest.approx(float(F.cross_entropy(model(x), y)), rel=1e-6)
    assert (reading.loss, reading.accuracy) == (reading.clean_loss, reading.clean_accuracy)


def test_weights_without_a_finite_answer_leave_a_hole_not_an_error() -> None:
    model = create_model("digits_cnn", seed=3).eval()
    probe = probe_of(model)
    with torch.no_grad():
        model.head.weight.fill_(3e38)  # finite, but what it multiplies is not
        model.head.weight[::2].neg_()
    told = probe().to_dict()
    assert told["loss"] is None
    assert told["clean_accuracy"] == 0


def test_damaged_weights_are_named_before_the_walk() -> None:
    model = create_model("digits_cnn", seed=3).eval()
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="damaged"):
        walk(model, probe_of(model), ledger())


class Tied(nn.Module):
    """Two layers that share a matrix; no BatchNorm anywhere."""

    def __init__(self) -> None:
        super().__init__()
        with kept_global_rng(seed=Seed(0)):
            self.first = nn.Linear(64, 64)
            self.second = nn.Linear(64, 64)
            self.head = nn.Linear(64, 10)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.second(self.first(x.flatten(1)).relu()).relu())
        return answer


def test_shared_weights_move_once_and_come_back() -> None:
    model = Tied().eval()
    told = moved(model)
    assert told["tied"] == [["first.weight", "second.weight"]]
    assert told["tensors"] == 2
    assert told["weights"] == 64 * 64 + 640
    direction = filter_direction(model, Seed(1))
    assert set(direction) == {"first.weight", "head.weight"}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = ledger()
    walk(model, probe_of(model), found, count=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.second.weight is model.first.weight
    point = found.get(place(0, 0))
    assert point is not None
    other = Tied().eval()
    with torch.no_grad():
        start = filter_direction(other, Seed(1).child("direction", 0, 0))
        other.first.weight.add_(-0.5 * start["first.weight"])
        other.head.weight.add_(-0.5 * start["head.weight"])
        x, y = inputs()
        assert point["clean_loss"] == pytest.approx(float(F.cross_entropy(other(x), y)), rel=1e-6)


def test_what_moves_is_told_by_name_and_shape() -> None:
    """The same weights behind a wrapper have other names, and with them other directions."""
    wrapped = Shifted(frozen=False)
    one, same, behind = (moved(net) for net in (wrapped.model, create_model("digits_cnn", seed=4), wrapped))
    assert one == same
    assert {name for name in one if one[name] != behind[name]} == {"digest"}


def test_a_network_without_matrices_has_no_direction() -> None:
    with pytest.raises(ModelError, match="no filters to move"):
        filter_direction(nn.BatchNorm2d(3), Seed(0))
    with pytest.raises(ModelError, match=r"not frozen, so no filters to move; model.requires_grad_\(True\) thaws them"):
        filter_direction(nn.Linear(2, 2).requires_grad_(False), Seed(0))


class Shifted(nn.Module):
    """A network behind a normalisation that is kept as buffers, or as parameters that are frozen."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        mean = torch.full((1, 1, 8, 8), 0.3)
        if frozen:
            self.mean = nn.Parameter(mean, requires_grad=False)
        else:
            self.register_buffer("mean", mean)
        self.model = create_model("digits_cnn", seed=3)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.model(x - self.mean)
        return answer


def test_what_is_frozen_stays_where_it_is() -> None:
    found = []
    for frozen in (True, False):
        model = Shifted(frozen=frozen).eval()
        points = ledger()
        walk(model, probe_of(model, n=8), points, count=1)
        found.append([points.get(place(0, i)) for i in (0, 4)])
        assert "mean" not in filter_direction(model, Seed(1))
        assert moved(model)["tensors"] == moved(model.model)["tensors"]
    assert found[0] == found[1]


# The ledger


def test_a_ledger_goes_on_from_its_file_and_forgets_half_a_line(tmp_path: Path) -> None:
    file = tmp_path / "walk.part"
    first = Ledger(file, {"what": 1}, resume=False)
    first.put("a", {"loss": 0.1})
    first.put("b", {"loss": None})
    with file.open("a") as f:
        f.write('{"key": "c", "loss": 3, "cr')
    again = Ledger(file, {"what": 1}, resume=True)
    assert (again.get("a"), again.get("b"), again.get("c")) == ({"loss": 0.1}, {"loss": None}, None)
    again.put("c", {"loss": 0.3})
    third = Ledger(file, {"what": 1}, resume=True)
    assert len(third) == 3
    third.close()
    assert not file.exists()


def test_a_ledger_refuses_other_questions_and_drops_altered_lines(tmp_path: Path) -> None:
    file = tmp_path / "walk.part"
    Ledger(file, {"what": 1, "seed": 0}, resume=False).put("a", {"loss": 0.1})
    with pytest.raises(StateError, match="different: seed"):
        Ledger(file, {"what": 1, "seed": 1}, resume=True)
    file.write_text(file.read_text().replace("0.1", "0.2"))
    assert Ledger(file, {"what": 1, "seed": 0}, resume=True).get("a") is None
    file.write_text("no JSON\n")
    with pytest.raises(StateError, match="damaged"):
        Ledger(file, {"what": 1, "seed": 0}, resume=True)
    assert len(Ledger(file, {"what": 1, "seed": 0}, resume=False)) == 0


def test_a_folder_in_its_place_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="left alone"):
        Ledger(tmp_path, {}, resume=False)


class Reshaped(nn.Module):
    """Flattens what its convolution returns without a copy, as many published networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).view(len(x), -1))


def test_inputs_of_a_half_pass_are_laid_out_as_the_weights_are() -> None:
    x, net = torch.rand(2, 3, 8, 8, generator=Seed(0).generator()), Reshaped()
    assert torch.allclose(HalfPass(net)(x), net(x), atol=0.05)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        HalfPass(net)(x)
