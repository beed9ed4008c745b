"""Vision transformers (Dosovitskiy et al. 2020, arXiv:2010.11929): tokens of patches, a class token, pre-norm blocks.

Parameters have the names and shapes the field gives them (timm, DeiT, MAE), so that such weights load as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatrock.core.errors import ConfigError
from flatrock.core.options import choose, count
from flatrock.models.classifier import Classifier

# That of the published networks; torch's own is 1e-5.
NORM_EPS = 1e-6
# Standard deviation of position embeddings and of the head at the beginning.
SMALL = 0.02
# Ways to resize a kernel, as torch calls them; the smooth ones read as many more numbers where it shrinks.
RESIZES = {"cubic": "bicubic", "bilinear": "bilinear", "nearest": "nearest-exact"}


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v in each head of d = width/heads numbers, then a linear layer over all heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = _drawn(nn.Linear(width, 3 * width), parts=3)
        self.proj = _drawn(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n, t, width] after looking at each other."""
        parts = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """fc2(gelu(fc1(x))) of every token, with the exact GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = _drawn(nn.Linear(width, hidden))
        self.fc2 = _drawn(nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """Each token for itself."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    """x <- x + attn(norm1(x)), x <- x + mlp(norm2(x))."""

    def __init__(self, width: int, *, heads: int, mlp: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = MLP(width, mlp)

    def forward(self, x: Tensor) -> Tensor:
        """The block applied to tokens."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class PatchEmbed(nn.Module):
    """One token per patch, row by row: a convolution as large as a patch; patches overlap where the stride is less."""

    def __init__(self, channels: int, width: int, *, patch: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """[n, c, h, w] to [n, t, width]."""
        out: Tensor = self.proj(x)
        return out.flatten(2).transpose(1, 2)


class Transformer(Classifier):
    """head(norm(blocks([token; embedded] + positions))[0]): what the class token has become are the features.

    `patch_embed` makes `grid` (rows, columns) tokens of an image; its last layer is a convolution `proj`. No dropout.
    `resize` says how the kernel of given weights is brought to the size of these patches.
    """

    resize = "cubic"

    def __init__(
        self,
        patch_embed: nn.Module,
        *,
        grid: tuple[int, int],
        depth: int,
        width: int,
        heads: int,
        mlp: int,
        input_shape: tuple[int, ...],
        num_classes: int,
    ) -> None:
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        self.grid = grid
        self.patch_embed = patch_embed
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + grid[0] * grid[1], width))
        self.blocks = nn.Sequential(*(Block(width, heads=heads, mlp=mlp) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, num_classes)
        self._draw()

    def embed(self, x: Tensor) -> Tensor:
        """The class token after the last block and LayerNorm."""
        tokens: Tensor = self.patch_embed(x)
        tokens = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], 1) + self.pos_embed
        out: Tensor = self.norm(self.blocks(tokens)[:, 0])  # a LayerNorm treats every token for itself
        return out

    def _draw(self) -> None:
        """Initial weights as published, but for the head: one of zeros gives the first attack no gradient to follow."""
        nn.init.normal_(self.pos_embed, std=SMALL)
        proj = self.patch_embed.get_submodule("proj")
        assert isinstance(proj, nn.Conv2d) and proj.bias is not None
        nn.init.kaiming_normal_(proj.weight, nonlinearity="linear")
        nn.init.normal_(self.head.weight, std=SMALL)
        nn.init.zeros_(proj.bias)
        nn.init.zeros_(self.head.bias)


class VisionTransformer(Transformer):
    """Patches of `patch` x `patch` pixels, `stride` apart (left out: side by side); `mlp` is 4 width if left out.

    `resize` (cubic, bilinear, nearest) concerns weights to begin with, of other patches.
    """

    def __init__(
        self,
        *,
        depth: int,
        width: int,
        heads: int,
        patch: int,
        stride: int | None = None,
        mlp: int | None = None,
        resize: str = "cubic",
        input_shape: Sequence[int] = (3, 32, 32),
        num_classes: int,
    ) -> None:
        choose("vit", "resize", resize, RESIZES)
        stride, mlp = patch if stride is None else stride, 4 * width if mlp is None else mlp
        shape = image_shape("vit", input_shape)
        check_sizes("vit", depth=depth, width=width, heads=heads, patch=patch, stride=stride, mlp=mlp)
        rows, columns = (_patches(size, patch, stride) for size in shape[1:])
        super().__init__(
            PatchEmbed(shape[0], width, patch=patch, stride=stride),
            grid=(rows, columns),
            depth=depth,
            width=width,
            heads=heads,
            mlp=mlp,
            input_shape=shape,
            num_classes=num_classes,
        )
        self.resize = resize


def image_shape(family: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """Channels, height and width; else ConfigError."""
    whole = isinstance(shape, Sequence) and all(type(size) is int and size > 0 for size in shape)
    if not whole or len(shape) != 3:
        raise ConfigError(f"{family} takes images: input_shape must be such as [3, 32, 32], got {shape!r}")
    channels, height, width = shape
    return channels, height, width


def check_sizes(family: str, *, width: int, heads: int, **others: int) -> None:
    """Whole numbers of at least 1, and a width that the heads share evenly."""
    for name, value in {"width": width, "heads": heads, **others}.items():
        count(family, name, value, least=1)
    if width % heads:
        raise ConfigError(f"{family} width must be a multiple of heads, got width {width} and {heads} heads")


def _patches(size: int, patch: int, stride: int) -> int:
    """How many patches lie side by side; together they must read every pixel."""
    if stride > patch:
        raise ConfigError(
            f"vit stride must not exceed patch, got stride {stride} and patch {patch}: pixels between are never read"
        )
    if size < patch or (size - patch) % stride:
        raise ConfigError(
            f"vit patches of {patch} pixels at stride {stride} do not end where {size} pixels do; "
            "choose patch and stride so that size - patch is a multiple of stride"
        )
    return (size - patch) // stride + 1


@torch.no_grad()
def _drawn(layer: nn.Linear, *, parts: int = 1) -> nn.Linear:
    """Glorot's uniform weights, U(-a, a) with a^2 = 6 / (in + out), for each of the layers in one; no bias."""
    for weight in layer.weight.chunk(parts):
        nn.init.xavier_uniform_(weight)
    nn.init.zeros_(layer.bias)
    return layer
