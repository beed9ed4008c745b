"""What other projects put around a network: it is taken off where the rest fits, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from foreign_nets import WideNet, randomised
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.models.catalog import create_model
from flatrock.models.convert import Converted, convert
from flatrock.models.foreign import same_normalization
from flatrock.models.pretrained import fitted
from flatrock.models.wrapping import closest, innermost, parts, readings

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.201)


@pytest.fixture(scope="module")
def wide() -> nn.Module:
    return randomised(WideNet(10, 1))


def prefixed(prefix: str, net: nn.Module) -> dict[str, Tensor]:
    return {prefix + k: v for k, v in net.state_dict().items()}


def channels(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(3, 1, 1)


def robustness(net: nn.Module, prefix: str = "module.") -> dict[str, Tensor]:
    """The network, the attacker's copy of it, and the normaliser of each."""
    shift = {"new_mean": channels(MEAN), "new_std": channels(STD)}
    return {
        **{f"{prefix}normalizer.{k}": v for k, v in shift.items()},
        **prefixed(f"{prefix}model.", net),
        **{f"{prefix}attacker.normalize.{k}": v for k, v in shift.items()},
        **prefixed(f"{prefix}attacker.model.", net),
    }


def answer(found: Converted, x: Tensor) -> Tensor:
    made = create_model(found.model_name, num_classes=found.num_classes, normalize=found.normalize, **found.options)
    made = made.double().eval()
    made.load_state_dict(found.state)
    with torch.no_grad():
        return made(x)


def images() -> Tensor:
    return torch.rand(2, 3, 32, 32, generator=Seed(4).generator(), dtype=torch.float64)


def expected(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net(x)


@pytest.mark.parametrize("prefix", ["net.", "backbone.", "encoder.", "module.backbone.net.", "1.", "a.b.c.d."])
def test_any_prefix_of_all_names_is_taken_off(prefix: str, wide: nn.Module) -> None:
    x = images()
    torch.testing.assert_close(answer(convert(prefixed(prefix, wide)), x), expected(wide, x), rtol=0, atol=1e-12)


def test_mean_and_std_may_lie_beside_the_prefix(wide: nn.Module) -> None:
    x = images()
    state = {**prefixed("net.", wide), "mean": channels(MEAN), "std": channels(STD)}
    shifted = (x - channels(MEAN)) / channels(STD)
    torch.testing.assert_close(answer(convert(state), x), expected(wide, shifted), rtol=0, atol=1e-12)


def test_own_names_and_transformers_under_a_prefix() -> None:
    for name in ("digits_cnn", "moons_mlp", "vit"):
        options: dict[str, Any] = {"depth": 1, "width": 6, "heads": 2, "mlp": 8, "patch": 4} if name == "vit" else {}
        source, model = (create_model(name, seed=seed, **options) for seed in (3, 4))
        state = {k: v for k, v in source.state_dict().items() if k not in ("mean", "std")}
        for prefix in ("", "module.encoder."):
            found = fitted(model, {prefix + k: v for k, v in state.items()})
            assert found.tensors.keys() == state.keys()
            assert all(torch.equal(found.tensors[k], v) for k, v in state.items())
            assert not found.drawn


def test_a_network_whose_own_names_begin_alike_is_taken_as_it_is() -> None:
    """Closest by names: what is inside the prefix is another network."""
    state = {"body.mean": torch.zeros(3), "body.std": torch.zeros(3), "body.weight": torch.ones(2)}
    assert closest(readings(state), state.keys()).state == state, "std = 0 is nobody's normalisation here"
    assert set(closest(readings({"a.b.weight": torch.ones(1)}), ["b.weight"]).state) == {"b.weight"}


def test_readings_end() -> None:
    assert [list(r.state) for r in readings({"a.b": torch.ones(1), "a.c": torch.ones(1)})] == [
        ["a.b", "a.c"],
        ["b", "c"],
    ]
    assert len(list(readings({}))) == 1
    assert len(list(readings({"n_classes": torch.tensor(3)}))) == 1


def test_part_of_a_file_is_refused_but_named(wide: nn.Module) -> None:
    student, teacher = prefixed("student.", wide), prefixed("teacher.", wide)
    for state, told in (
        ({**student, **teacher}, "--which student or --which teacher"),
        ({**student, "projector.weight": torch.ones(2)}, r"--which student \(for"),
        ({**prefixed("module.student.", wide), "module.odd": torch.ones(2)}, r"--which module\.student \(for"),
    ):
        with pytest.raises(ConfigError, match=rf"one part of these weights alone is recognised: say {told}"):
            convert(state)


def test_refusals_see_through_prefixes() -> None:
    names = ("conv1.weight", "bn1.weight", "layer1.0.conv2.weight", "layer1.0.conv3.weight", "linear.weight")
    with pytest.raises(ConfigError, match="bottleneck"):
        convert({f"encoder.{name}": torch.zeros(4, 4) for name in names})
    with pytest.raises(ConfigError, match=r"\(net.blob.a, net.blob.b, ...\) have the names of no family"):
        convert({"net.blob.a": torch.zeros(4), "net.blob.b": torch.zeros(4)})


# MadryLab's robustness


@pytest.mark.parametrize("prefix", ["module.", ""])
def test_the_attackers_copy_is_dropped_and_the_normaliser_kept(prefix: str, wide: nn.Module) -> None:
    x = images()
    found = convert(robustness(wide, prefix))
    assert found.normalize == (MEAN, STD)
    shifted = (x - channels(MEAN)) / channels(STD)
    torch.testing.assert_close(answer(found, x), expected(wide, shifted), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "victim", ["module.attacker.model.fc.weight", "module.attacker.normalize.new_std", "module.attacker.model.odd"]
)
def test_an_attacker_that_is_no_copy_is_not_dropped(victim: str, wide: nn.Module) -> None:
    state = robustness(wide)
    state[victim] = state[victim] + 1 if victim in state else torch.ones(1)
    with pytest.raises(ConfigError, match=r"say --which module\.model or --which module\.attacker\.model \("):
        convert(state)


def test_another_kind_of_number_is_no_copy(wide: nn.Module) -> None:
    state = robustness(wide)
    state["module.attacker.model.fc.bias"] = state["module.attacker.model.fc.bias"].float()
    with pytest.raises(ConfigError, match="one part of these weights alone"):
        convert(state)


# MAIR


@pytest.mark.parametrize("inner", ["model.", "model.module."])
def test_the_number_of_classes_beside_the_network_is_dropped(inner: str, wide: nn.Module) -> None:
    x = images()
    beside = {"n_classes": torch.tensor(10), "mean": torch.tensor(MEAN), "std": torch.tensor(STD)}
    found = convert({**beside, **prefixed(inner, wide)})
    shifted = (x - channels(MEAN)) / channels(STD)
    torch.testing.assert_close(answer(found, x), expected(wide, shifted), rtol=0, atol=1e-6)


def test_a_normaliser_put_into_the_network(wide: nn.Module) -> None:
    layers = {"model.0.mean": torch.tensor(MEAN), "model.0.std": torch.tensor(STD), **prefixed("model.1.", wide)}
    found = convert({"n_classes": torch.tensor(10), **layers})
    assert found.normalize is not None
    assert found.normalize[0] == pytest.approx(MEAN)


def test_classes_that_are_no_number_stay(wide: nn.Module) -> None:
    state = {"n_classes": torch.ones(10), **prefixed("model.", wide)}
    assert innermost(state, lambda names: "fc.weight" in names) is None
    assert parts(state, lambda names: "fc.weight" in names) == ["model"]


def test_mean_0_and_std_1_are_no_normalisation() -> None:
    nothing = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert same_normalization(None, nothing)
    assert same_normalization(nothing, None)
    assert same_normalization(None, None)
    assert not same_normalization(None, (MEAN, STD))
    assert not same_normalization((MEAN, STD), nothing)
