"""Pieces that several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from flatrock.core.errors import ConfigError
from flatrock.core.options import count, share
from flatrock.models.norm import PromptNorm2d

# Makes the BatchNorm of so many channels.
MakeNorm = Callable[[int], nn.BatchNorm2d]
ACTIVATIONS = ("relu", "silu")


def conv(inner: int, outer: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Convolution without bias, padded to keep the size at stride 1."""
    return nn.Conv2d(inner, outer, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)


def he_fan_out(model: nn.Module) -> None:
    """Draw every convolution from N(0, 2 / (k*k*out)): He initialisation by fan-out."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def blocks_per_group(depth: object, *, family: str, offset: int) -> int:
    """n of depth = 6n + offset: three groups of n blocks with two convolutions each."""
    if isinstance(depth, bool) or not isinstance(depth, int) or depth <= offset or (depth - offset) % 6:
        examples = ", ".join(str(6 * n + offset) for n in (1, 2, 3, 4, 5))
        raise ConfigError(
            f"{family} depth must be an integer 6n + {offset} with n >= 1, got {depth!r}; use one of {examples}, ..."
        )
    return (depth - offset) // 6


def norm_maker(family: str, momentum: float, first: int) -> MakeNorm:
    """BatchNorms that take statistics over with this momentum; those of the `first` batches they see in full."""
    share(family, "bn_momentum", momentum)
    count(family, "bn_first", first, least=0)
    if momentum == 0:
        raise ConfigError(f"{family} bn_momentum must be above 0, got {momentum!r}; torch has 0.1, Gowal et al. 0.01")
    if first:
        return partial(PromptNorm2d, momentum=momentum, first=first)
    return partial(nn.BatchNorm2d, momentum=momentum)


def activated(norm: nn.Module, x: Tensor, activation: str = "relu") -> Tensor:
    """relu(norm(x)); a BatchNorm that for a while knows a way to do both at once is asked for it. Or silu(norm(x))."""
    if activation == "silu":
        return F.silu(norm(x))
    both = getattr(norm, "activated", None)
    return F.relu(norm(x)) if both is None else both(x)


class PreActBlock(nn.Module):
    """Two 3x3 convolutions, each after BatchNorm and activation; out = conv2(a(conv1(a(x)))) + shortcut.

    The shortcut is x, or a 1x1 convolution of the ACTIVATED input where the size or width changes.
    """

    def __init__(
        self, inner: int, outer: int, *, stride: int, norm: MakeNorm = nn.BatchNorm2d, activation: str = "relu"
    ) -> None:
        super().__init__()
        self.activation = activation
        self.bn1 = norm(inner)
        self.conv1 = conv(inner, outer, 3, stride=stride)
        self.bn2 = norm(outer)
        self.conv2 = conv(outer, outer, 3)
        self.shortcut = conv(inner, outer, 1, stride=stride) if stride != 1 or inner != outer else None

    def forward(self, x: Tensor) -> Tensor:
        """The block applied to a feature map."""
        active = activated(self.bn1, x, self.activation)
        out: Tensor = self.conv2(activated(self.bn2, self.conv1(active), self.activation))
        return out + (x if self.shortcut is None else self.shortcut(active))


class PostActBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm; out = relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut).

    The shortcut is x, or a 1x1 convolution with BatchNorm where the size or width changes (option B).
    """

    def __init__(self, inner: int, outer: int, *, stride: int, norm: MakeNorm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = conv(inner, outer, 3, stride=stride)
        self.bn1 = norm(outer)
        self.conv2 = conv(outer, outer, 3)
        self.bn2 = norm(outer)
        changes = stride != 1 or inner != outer
        self.shortcut = nn.Sequential(conv(inner, outer, 1, stride=stride), norm(outer)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The block applied to a feature map."""
        out = activated(self.bn1, self.conv1(x))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def stages(block: Callable[..., nn.Module], inner: int, widths: Sequence[int], *, blocks: int) -> nn.Sequential:
    """One stage of `blocks` blocks per width; every stage but the first halves the size."""
    made: list[nn.Module] = []
    for i, width in enumerate(widths):
        for j in range(blocks):
            made.append(block(inner, width, stride=2 if i > 0 and j == 0 else 1))
            inner = width
    return nn.Sequential(*made)


def global_average(x: Tensor) -> Tensor:
    """[n, c, h, w] to [n, c]: the mean of each channel."""
    return x.mean((2, 3))
