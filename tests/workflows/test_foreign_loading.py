"""Models that flatrock did not train: what is loaded, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from foreign_cases import noise, outputs, wide_file
from foreign_nets import randomised
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.models.catalog import NORMALIZATIONS, create_model
from flatrock.workflows.foreign import load_foreign

pytestmark = pytest.mark.usefixtures("here")


def test_weights_alone_where_the_family_is_known(here: Path) -> None:
    path, net = wide_file(here)
    x = noise(2, 3, 32, 32)
    model = load_foreign(weights=path)
    torch.testing.assert_close(outputs(model, x), net(x), rtol=0, atol=1e-5)
    same = load_foreign("wide_resnet", weights=path, num_classes=10, normalize="none")
    assert torch.equal(outputs(same, x), outputs(model, x))


def test_normalisation_by_name_and_from_the_file(here: Path) -> None:
    mean, std = NORMALIZATIONS["cifar10"]
    shift = {"module.mu": torch.tensor(mean).reshape(1, 3, 1, 1), "module.sigma": torch.tensor(std).reshape(1, 3, 1, 1)}
    x = noise(2, 3, 32, 32)
    path, net = wide_file(here)
    asked = outputs(load_foreign(weights=path, normalize="cifar10"), x)
    torch.testing.assert_close(asked, net((x - shift["module.mu"]) / shift["module.sigma"]), rtol=0, atol=1e-4)
    path, _ = wide_file(here, **shift)
    assert torch.equal(outputs(load_foreign(weights=path), x), asked)
    assert torch.equal(outputs(load_foreign(weights=path, normalize="cifar10"), x), asked)
    for other in ("svhn", "none", "moons"):
        with pytest.raises(ConfigError, match=rf"normalize is '{other}', but the weights come with mean \(0.4914"):
            load_foreign(weights=path, normalize=other)


def test_own_names_need_the_name_of_the_network(here: Path) -> None:
    source = create_model("digits_cnn", num_classes=7, normalize=([0.3], [0.5]), seed=5).eval()
    torch.save(source.state_dict(), here / "own.pt")
    x = noise(3, 1, 8, 8)
    assert torch.equal(outputs(load_foreign("digits_cnn", weights=here / "own.pt"), x), outputs(source, x))
    with pytest.raises(ConfigError, match="flatrock's own names"):
        load_foreign(weights=here / "own.pt")
    with pytest.raises(ConfigError, match=r"do not fit flatrock's mnist_cnn[\s\S]*missing[\s\S]*extra[\s\S]*misshapen"):
        load_foreign("mnist_cnn", weights=here / "own.pt")


def test_factory_with_its_own_weights_and_with_a_file(here: Path) -> None:
    x = noise(3, 1, 8, 8)
    own = load_foreign("foreign_module:net")
    assert torch.equal(outputs(own, x), outputs(load_foreign("foreign_module:net"), x))
    other = randomised(load_foreign("foreign_module:net")).float()
    torch.save({"net": {f"module._orig_mod.{k}": v for k, v in other.state_dict().items()}, "epoch": 1}, here / "f.pt")
    loaded = load_foreign("foreign_module:net", weights=here / "f.pt")
    assert torch.equal(outputs(loaded, x), outputs(other, x))
    assert not torch.equal(outputs(loaded, x), outputs(own, x))


def test_normalisation_of_a_file_is_not_lost_between_file_and_factory(here: Path) -> None:
    x = noise(3, 1, 8, 8)
    net = randomised(load_foreign("foreign_module:net")).float()
    state = {f"model.{k}": v for k, v in net.state_dict().items()}
    state |= {"mean": torch.full((1, 1, 1), 0.3), "std": torch.full((1, 1, 1), 0.5)}
    torch.save(state, here / "f.pt")
    expected = outputs(net, (x - 0.3) / 0.5)
    for factory in ("foreign_module:net", "foreign_module:Shifted"):
        torch.testing.assert_close(outputs(load_foreign(factory, weights=here / "f.pt"), x), expected)
    torch.save({k.removeprefix("model."): v for k, v in state.items()}, here / "flat.pt")
    flat = load_foreign("foreign_module:net", weights=here / "flat.pt")
    torch.testing.assert_close(outputs(flat, x), expected)


def of(net: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {prefix + k: v for k, v in net.state_dict().items()}


def test_factory_and_a_prefix_nobody_knows(here: Path) -> None:
    x = noise(3, 1, 8, 8)
    net = randomised(load_foreign("foreign_module:net")).float()
    torch.save({"state_dict": of(net, "lit.backbone.")}, here / "f.pt")
    assert torch.equal(outputs(load_foreign("foreign_module:net", weights=here / "f.pt"), x), outputs(net, x))
    with pytest.raises(ConfigError, match="do not fit the network of foreign_module:eleven"):
        load_foreign("foreign_module:eleven", weights=here / "f.pt")


def test_factory_and_one_of_two_networks(here: Path) -> None:
    x = noise(3, 1, 8, 8)
    net, other = (randomised(load_foreign("foreign_module:net")).float() for _ in range(2))
    other[1].weight.data.mul_(2)
    torch.save({"state_dict": {**of(net, "student."), **of(other, "teacher.")}}, here / "f.pt")
    with pytest.raises(ConfigError, match=r"extra[\s\S]*alone fits: say --which student or --which teacher"):
        load_foreign("foreign_module:net", weights=here / "f.pt")
    for which, wanted in (("student", net), ("teacher", other)):
        found = load_foreign("foreign_module:net", weights=here / "f.pt", which=which)
        assert torch.equal(outputs(found, x), outputs(wanted, x))
    torch.save({**of(net, "net."), "projector.weight": torch.ones(2)}, here / "f.pt")
    with pytest.raises(ConfigError, match=r"extra[\s\S]*alone fits: say --which net \("):
        load_foreign("foreign_module:net", weights=here / "f.pt")


def test_own_names_and_one_of_two_networks(here: Path) -> None:
    x = noise(3, 1, 8, 8)
    one, two = (create_model("digits_cnn", num_classes=7, normalize=([0.3], [0.5]), seed=s).eval() for s in (1, 2))
    torch.save({**of(one, "student."), **of(two, "teacher.")}, here / "f.pt")
    with pytest.raises(ConfigError, match=r"f\.pt alone fits 'digits_cnn': say --which student or --which teacher \("):
        load_foreign("digits_cnn", weights=here / "f.pt")
    found = load_foreign("digits_cnn", weights=here / "f.pt", which="teacher")
    assert torch.equal(outputs(found, x), outputs(two, x))
    for name in ("mnist_cnn", "vit"):
        with pytest.raises(ConfigError, match="have the names of no family"):
            load_foreign(name, weights=here / "f.pt")


def test_layouts_of_robustness_and_mair(here: Path) -> None:
    x = noise(3, 1, 8, 8)
    net = randomised(load_foreign("foreign_module:net")).float()
    mean, std = torch.full((1, 1, 1), 0.3), torch.full((1, 1, 1), 0.5)
    shift = {"new_mean": mean, "new_std": std}
    attacked = {f"module.attacker.normalize.{k}": v for k, v in shift.items()} | of(net, "module.attacker.model.")
    madry = {**{f"module.normalizer.{k}": v for k, v in shift.items()}, **of(net, "module.model."), **attacked}
    torch.save({"model": madry, "epoch": 3, "optimizer": {"state": {}, "param_groups": []}}, here / "madry.pt")
    mair = {"n_classes": torch.tensor(10), "mean": mean.flatten(), "std": std.flatten(), **of(net, "model.")}
    torch.save({"rmodel": mair, "optimizer": {"state": {}, "param_groups": []}}, here / "mair.pt")
    for name in ("madry.pt", "mair.pt"):
        found = load_foreign("foreign_module:net", weights=here / name)
        torch.testing.assert_close(outputs(found, x), outputs(net, (x - 0.3) / 0.5))
        with pytest.raises(ConfigError, match=r"normalize is 'none', but the weights come with mean \(0.3\)"):
            load_foreign("foreign_module:net", weights=here / name, normalize="none")
    mair |= {"mean": torch.zeros(1), "std": torch.ones(1)}
    torch.save({"rmodel": mair}, here / "mair.pt")
    for said in (None, "none"):
        found = load_foreign("foreign_module:net", weights=here / "mair.pt", normalize=said)
        torch.testing.assert_close(outputs(found, x), outputs(net, x), rtol=0, atol=0)


def test_factory_and_file_that_do_not_fit(here: Path) -> None:
    torch.save({"1.weight": torch.zeros(10, 64), "1.bias": torch.zeros(10), "9.odd": torch.zeros(1)}, here / "f.pt")
    with pytest.raises(ConfigError) as error:
        load_foreign("foreign_module:eleven", weights=here / "f.pt")
    for text in ("the network of foreign_module:eleven", "extra (1): 9.odd", "1.weight is [10, 64], not [11, 64]"):
        assert text in str(error.value)


def test_name_classes_and_entry_must_agree_with_the_file(here: Path) -> None:
    path, _ = wide_file(here)
    for name in ("preact_resnet18", "wide_resnet28_10"):
        with pytest.raises(ConfigError, match=rf"model is '{name}', but .*WideResNet of TRADES \(wide_resnet\)"):
            load_foreign(name, weights=path)
    with pytest.raises(ConfigError, match=r"num_classes is 100, but the weights .* have 10"):
        load_foreign(weights=path, num_classes=100)
    with pytest.raises(ConfigError, match="'ema'; known: state_dict"):
        load_foreign(weights=path, which="ema")


def test_faults_of_loading_come_together(here: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_foreign("preact_resnet8", weights=here / "no.pt", num_classes=1, normalize="cifar")
    text = str(error.value)
    for part in ("did you mean 'preact_resnet18'", "there is no file", ">= 2, got 1", "did you mean 'cifar10'"):
        assert part in text
    with pytest.raises(ConfigError, match="'resnet18' has no weights of its own; give --weights FILE"):
        load_foreign("resnet18")
    with pytest.raises(ConfigError, match="give --model NAME or"):
        load_foreign()
