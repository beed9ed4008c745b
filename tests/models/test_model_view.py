"""view(): the last linear layer of anybody's network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.errors import ModelError
from flatrock.models.catalog import create_model
from flatrock.models.view import view


class Net(nn.Module):
    """Two linear layers, an optional last word on the logits."""

    def __init__(self, after: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 5)
        self.unused = nn.Linear(9, 9)
        self.out = nn.Linear(5, 3)
        self.after = after

    def forward(self, x: Tensor) -> object:
        logits = self.out(input=self.hidden(x.flatten(1)).relu())
        return logits if self.after is None else self.after(logits)


def x() -> Tensor:
    return torch.rand(6, 4, generator=torch.Generator().manual_seed(0))


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_classifier_answers_itself() -> None:
    model = create_model("digits_cnn").eval()
    images = torch.rand(3, 1, 8, 8)
    seen = view(model, images)
    assert torch.equal(seen.features, model.features(images))
    assert torch.equal(seen.logits, model(images))


def test_last_linear_layer_executed_not_declared() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(5, 3)
            self.first = nn.Linear(4, 5)

        def forward(self, z: Tensor) -> Tensor:
            return self.last(self.first(z).tanh())

    model = Backwards()
    seen = view(model, x())
    assert torch.equal(seen.features, model.first(x()).tanh())
    assert torch.equal(seen.logits, model(x()))
    assert hooks(model) == 0


def test_layer_called_twice_counts_with_its_last_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, z: Tensor) -> Tensor:
            return self.fc(self.fc(z).relu())

    model = Twice()
    assert torch.equal(view(model, x()).features, model.fc(x()).relu())


def test_bare_linear_layer_and_keyword_input() -> None:
    layer = nn.Linear(4, 2)
    assert torch.equal(view(layer, x()).features, x())
    net = Net()
    assert torch.equal(view(net, x()).features, net.hidden(x()).relu())


def test_gradients_flow_to_input_and_weights() -> None:
    net, z = Net(), x().requires_grad_()
    seen = view(net, z)
    grads = torch.autograd.grad(seen.features.sum() + seen.logits.sum(), [z, net.hidden.weight, net.out.weight])
    assert all(g.any() for g in grads)


@pytest.mark.parametrize(
    "after", [lambda t: t.clone(), lambda t: t[:], lambda t: t.double()], ids=["copy", "alias", "cast"]
)
def test_unchanged_values_are_accepted(after: Callable[[Tensor], Tensor]) -> None:
    net = Net(after)
    seen = view(net, x())
    assert torch.equal(seen.logits, net(x()))
    assert torch.equal(seen.logits, net.out(seen.features).to(seen.logits.dtype))


@pytest.mark.parametrize(
    ("after", "returned"),
    [
        (lambda t: t.softmax(1), r"the output \[6, 3\] of its last nn.Linear \(the values differ\);"),
        (lambda t: t / 2, r"returns \[6, 3\]"),
        (lambda t: t.div_(2), r"returns \[6, 3\]"),
        (lambda t: t[:, :2], r"returns \[6, 2\], which is not the output \[6, 3\]"),
        (lambda t: {"logits": t}, r"returns a dict"),
    ],
    ids=["softmax", "scaled", "scaled in place", "cut", "dict"],
)
def test_changed_output_is_refused(after: Callable[[Tensor], object], returned: str) -> None:
    net = Net(after)
    with pytest.raises(ModelError, match=returned) as error:
        view(net, x())
    assert "return that layer's output unchanged" in str(error.value)
    assert hooks(net) == 0


def test_modes_without_gradient_and_forward_derivatives() -> None:
    net = Net()
    with torch.inference_mode():
        assert torch.equal(view(net, x()).features, net.hidden(x()).relu())
    direction = torch.ones(6, 4)
    _, slope = torch.func.jvp(lambda z: view(net, z).logits, (x(),), (direction,))
    _, direct = torch.func.jvp(net, (x(),), (direction,))
    assert torch.equal(slope, direct)
    assert slope.any()


def test_one_row_per_token_is_refused() -> None:
    with pytest.raises(ModelError, match=r"returns \[2, 7, 3\].*one row per input"):
        view(nn.Linear(4, 3), torch.rand(2, 7, 4))


def test_no_linear_layer() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Conv1d(1, 1, 1))
    with pytest.raises(ModelError, match=r"Sequential .* it has no nn\.Linear layer; end the model with an nn\.Linear"):
        view(model, torch.rand(1, 4))


def test_linear_layer_that_never_ran() -> None:
    class Bypass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, z: Tensor) -> Tensor:
            return z @ self.fc.weight.T

    with pytest.raises(ModelError, match=r"none of its 1 nn\.Linear layers ran"):
        view(Bypass(), x())


def test_hooks_are_removed_on_success_and_on_error() -> None:
    net = Net()
    own = net.out.register_forward_hook(lambda *_: None)
    view(net, x())
    assert hooks(net) == 1
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        view(net, torch.rand(6, 3))
    assert hooks(net) == 1
    own.remove()
