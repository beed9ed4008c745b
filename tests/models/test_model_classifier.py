"""What every network here does: features, logits, gradients, shape check, and torch's transformations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatrock.core.errors import ConfigError, ModelError
from flatrock.models.catalog import create_model
from flatrock.models.classifier import Classifier
from flatrock.models.layers import PostActBlock, PreActBlock
from flatrock.models.vgg import VGG

# The wide family by its smallest member with every kind of block; the named sizes differ in depth and width only.
SMALL = {
    "preact_resnet18": {},
    "resnet18": {},
    "wide_resnet": {"depth": 10, "width": 2},
    "vgg16_bn": {},
    "mobilenet_v2": {},
    "resnet20": {},
    "lenet5": {},
    "mnist_cnn": {},
    "digits_cnn": {},
    "moons_mlp": {"num_classes": 2},
}


def inputs(model: Classifier, n: int = 2) -> Tensor:
    return torch.rand(n, *model.input_shape, generator=torch.Generator().manual_seed(5))


def gradients(model: Classifier) -> dict[str, Tensor]:
    x = inputs(model, 4)
    model.zero_grad(set_to_none=True)
    F.cross_entropy(model(x), torch.tensor([0, 1, 1, 0])).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters())), "a parameter took no part"
    return found


@pytest.mark.parametrize("name", SMALL)
def test_view_is_the_head_on_its_input(name: str) -> None:
    model = create_model(name, **SMALL[name]).eval()
    x = inputs(model)
    view = model.view(x)
    assert torch.equal(model.head(view.features), view.logits)
    assert torch.equal(model(x), view.logits)
    assert torch.equal(model.features(x), view.features)
    assert view.logits.shape == (2, model.num_classes)
    assert bool(torch.isfinite(view.logits).all())


@pytest.mark.parametrize("name", [name for name in SMALL if name != "mnist_cnn"])
def test_every_parameter_receives_a_gradient(name: str) -> None:
    # Eval mode: in train mode a convolution's bias before BatchNorm (VGG) has gradient zero by construction.
    found = gradients(create_model(name, **SMALL[name]).eval())
    assert [key for key, grad in found.items() if not grad.any()] == []


def test_mnist_cnn_moves_only_its_head_on_the_first_step() -> None:
    model = create_model("mnist_cnn").eval()
    first = gradients(model)
    assert {key for key, grad in first.items() if grad.any()} == {"head.weight", "head.bias"}
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.sub_(0.1 * first[key])
    assert all(grad.any() for grad in gradients(model).values())


def test_gradient_reaches_every_pixel_through_normalisation() -> None:
    model = create_model("resnet20", normalize="cifar10").eval()
    x = inputs(model).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x)
    assert grad.shape == x.shape
    assert bool((grad != 0).all())


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet20", (2, 3, 28, 28), r"expects inputs of shape \[n, 3, 32, 32\], got \[2, 3, 28, 28\]"),
        ("resnet20", (2, 1, 32, 32), r"\[n, 3, 32, 32\], got \[2, 1, 32, 32\]"),
        ("resnet20", (3, 32, 32), r"\[n, 3, 32, 32\], got \[3, 32, 32\]; give a batch of one: x\[None\]"),
        ("mnist_cnn", (2, 784), r"\[n, 1, 28, 28\], got \[2, 784\]"),
        ("moons_mlp", (5, 3), r"MoonsMLP expects inputs of shape \[n, 2\], got \[5, 3\]"),
    ],
)
def test_wrong_input_shape(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        create_model(name)(torch.rand(shape))


@pytest.mark.parametrize("name", SMALL)
def test_empty_batch(name: str) -> None:
    model = create_model(name, **SMALL[name]).eval()
    assert model(inputs(model, 0)).shape == (0, model.num_classes)


def test_no_normalisation_means_no_buffer_and_no_copy() -> None:
    seen: list[Tensor] = []

    class Probe(Classifier):
        def __init__(self) -> None:
            super().__init__(input_shape=(2,), num_classes=2)
            self.head = nn.Linear(2, 2)

        def embed(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x

    x = torch.rand(3, 2)
    model = Probe()
    model(x)
    assert seen[0] is x
    assert list(model.buffers()) == []


def test_classifier_without_embed_cannot_be_made() -> None:
    class Half(Classifier):
        pass

    with pytest.raises(TypeError, match="embed"):
        Half(input_shape=(2,), num_classes=2)  # type: ignore[abstract]


def test_vgg_depth() -> None:
    with pytest.raises(ConfigError, match="one of 16, 19, got 13"):
        VGG(depth=13, num_classes=10)


def test_dropout_acts_in_train_mode_only() -> None:
    model = create_model("mnist_cnn")
    x = inputs(model)
    assert not torch.equal(model.train().features(x), model.features(x))
    assert torch.equal(model.eval().features(x), model.features(x))


def _norm(bn: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(bn, nn.BatchNorm2d)
    return F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, eps=bn.eps)


def _shaken(block: nn.Module) -> nn.Module:
    """Eval mode with BatchNorm statistics and scales away from identity, so that skipping one shows."""
    gen = torch.Generator().manual_seed(0)
    for m in block.modules():
        if isinstance(m, nn.BatchNorm2d):
            for t in (m.running_mean, m.running_var, m.weight.data, m.bias.data):
                assert t is not None
                t.copy_(torch.rand(t.shape, generator=gen) + 0.5)
    return block.eval()


def test_preact_block_by_hand() -> None:
    x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    for outer, stride in ((4, 1), (8, 2)):
        block = _shaken(PreActBlock(4, outer, stride=stride))
        assert isinstance(block, PreActBlock)
        active = _norm(block.bn1, x).relu()
        middle = F.conv2d(active, block.conv1.weight, stride=stride, padding=1)
        out = F.conv2d(_norm(block.bn2, middle).relu(), block.conv2.weight, padding=1)
        side = x if block.shortcut is None else F.conv2d(active, block.shortcut.weight, stride=stride)
        assert (block.shortcut is None) == (outer == 4)
        torch.testing.assert_close(block(x), out + side, rtol=0, atol=0)


def test_postact_block_by_hand() -> None:
    x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    block = _shaken(PostActBlock(4, 8, stride=2))
    assert isinstance(block, PostActBlock)
    assert isinstance(block.shortcut, nn.Sequential)
    middle = _norm(block.bn1, F.conv2d(x, block.conv1.weight, stride=2, padding=1)).relu()
    out = _norm(block.bn2, F.conv2d(middle, block.conv2.weight, padding=1))
    side = _norm(block.shortcut[1], F.conv2d(x, block.shortcut.get_parameter("0.weight"), stride=2))
    torch.testing.assert_close(block(x), (out + side).relu(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["resnet20", "digits_cnn", "lenet5"])
def test_channels_last_gives_the_same(name: str) -> None:
    model = create_model(name).eval().double()
    x = inputs(model).double()
    plain = model(x)
    last = model.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["resnet20", "mobilenet_v2", "moons_mlp"])
def test_bf16_autocast(name: str) -> None:
    model = create_model(name).eval()
    x = inputs(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    assert logits.dtype == torch.bfloat16
    reference = model(x)
    assert (logits.float() - reference).norm() < 0.05 * reference.norm()


def test_jvp_through_functional_call_matches_differences() -> None:
    model = create_model("digits_cnn", normalize=([0.3], [0.4])).eval().double()
    x = inputs(model).double()
    params = {k: p.detach() for k, p in model.named_parameters()}
    gen = torch.Generator().manual_seed(2)
    tangent = {k: torch.randn(p.shape, generator=gen, dtype=p.dtype) * 1e-2 for k, p in params.items()}

    def logits(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, p, (x,))

    _, slope = torch.func.jvp(logits, (params,), (tangent,))
    h = 1e-6
    ahead, behind = (logits({k: p + s * h * tangent[k] for k, p in params.items()}) for s in (1, -1))
    torch.testing.assert_close(slope, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["digits_cnn", "moons_mlp", "mnist_cnn", "wide_resnet"])
def test_one_graph_for_forward_and_view(name: str) -> None:
    options = SMALL[name]
    model = create_model(name, normalize="centered", **options).eval()
    x = inputs(model)
    torch.compiler.reset()
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
    compiled = torch.compile(model.view, backend="eager", fullgraph=True)(x)
    assert torch.equal(compiled.features, model.features(x))
    assert torch.equal(compiled.logits, model(x))
    torch.compiler.reset()
