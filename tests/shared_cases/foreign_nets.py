"""Networks of other projects, written anew for the tests: their names of layers, their order of operations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatrock.core.rng import Seed


def conv3(inner: int, outer: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inner, outer, 3, stride, 1, bias=False)


class PreActivated(nn.Module):
    """BatchNorm, ReLU, convolution, twice; the projection takes the activated input."""

    def __init__(self, inner: int, outer: int, stride: int, *, projection: str) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inner), conv3(inner, outer, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(outer), conv3(outer, outer)
        self.projection = projection if inner != outer or stride != 1 else ""
        if self.projection:
            layer: nn.Module = nn.Conv2d(inner, outer, 1, stride, bias=False)
            setattr(self, projection, nn.Sequential(layer) if projection == "shortcut" else layer)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.bn1(x))
        skip = getattr(self, self.projection)(a) if self.projection else x
        return skip + self.conv2(torch.relu(self.bn2(self.conv1(a))))


class PostActivated(nn.Module):
    """Convolution, BatchNorm, twice; ReLU after the sum."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3(inner, outer, stride), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = conv3(outer, outer), nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential()
        if inner != outer or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inside + self.shortcut(x))


class LayeredResNet(nn.Module):
    """conv1, (bn1,) layer1 to layer4, (bn,) linear."""

    def __init__(self, *, pre: bool, classes: int = 10, last_bn: bool = True, blocks: int = 2) -> None:
        super().__init__()
        self.conv1 = conv3(3, 64)
        if not pre:
            self.bn1 = nn.BatchNorm2d(64)
        inner = 64
        for stage, outer in enumerate((64, 128, 256, 512), start=1):
            made: list[nn.Module] = []
            for j in range(blocks):
                stride = 2 if stage > 1 and j == 0 else 1
                made.append(
                    PreActivated(inner, outer, stride, projection="shortcut")
                    if pre
                    else PostActivated(inner, outer, stride)
                )
                inner = outer
            setattr(self, f"layer{stage}", nn.Sequential(*made))
        if pre and last_bn:
            self.bn = nn.BatchNorm2d(512)
        self.linear = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        if hasattr(self, "bn1"):
            x = torch.relu(self.bn1(x))
        for stage in (1, 2, 3, 4):
            x = getattr(self, f"layer{stage}")(x)
        if hasattr(self, "bn"):
            x = torch.relu(self.bn(x))
        return self.linear(F.avg_pool2d(x, 4).flatten(1))


class Group(nn.Module):
    def __init__(self, count: int, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        first = PreActivated(inner, outer, stride, projection="convShortcut")
        rest = [PreActivated(outer, outer, 1, projection="convShortcut") for _ in range(count - 1)]
        self.layer = nn.Sequential(first, *rest)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class WideNet(nn.Module):
    """conv1, block1 to block3, bn1, fc; some projects build sub_block1 as well and never call it."""

    def __init__(self, depth: int, width: int, *, classes: int = 10, idle_group: bool = False) -> None:
        super().__init__()
        n = (depth - 4) // 6
        self.conv1 = conv3(3, 16)
        self.block1 = Group(n, 16, 16 * width, 1)
        if idle_group:
            self.sub_block1 = Group(n, 16, 16 * width, 1)
        self.block2 = Group(n, 16 * width, 32 * width, 2)
        self.block3 = Group(n, 32 * width, 64 * width, 2)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        return self.fc(F.avg_pool2d(torch.relu(self.bn1(x)), 8).flatten(1))


class PlainVgg(nn.Module):
    """features.N and one linear layer named classifier; a last pooling of size 1 does nothing."""

    def __init__(self, counts: tuple[int, ...] = (2, 2, 3, 3, 3), *, classes: int = 10) -> None:
        super().__init__()
        made: list[nn.Module] = []
        inner = 3
        for outer, count in zip((64, 128, 256, 512, 512), counts, strict=True):
            for _ in range(count):
                made += [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]
                inner = outer
            made.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*made, nn.AvgPool2d(1))
        self.classifier = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class Expanding(nn.Module):
    def __init__(self, inner: int, outer: int, factor: int, stride: int) -> None:
        super().__init__()
        wide = inner * factor
        self.conv1, self.bn1 = nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.conv2 = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.conv3, self.bn3 = nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential()
        if stride == 1 and inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer))
        self.adds = stride == 1

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))
        inside = self.bn3(self.conv3(inside))
        return inside + self.shortcut(x) if self.adds else inside


class Mobile(nn.Module):
    """conv1, bn1, layers.0 to layers.16, conv2, bn2, linear."""

    def __init__(self, *, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3(3, 32), nn.BatchNorm2d(32)
        made: list[nn.Module] = []
        inner = 32
        plan = [
            (1, 16, 1, 1),
            (6, 24, 2, 1),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        ]
        for factor, outer, count, stride in plan:
            for j in range(count):
                made.append(Expanding(inner, outer, factor, stride if j == 0 else 1))
                inner = outer
        self.layers = nn.Sequential(*made)
        self.conv2, self.bn2 = nn.Conv2d(320, 1280, 1, bias=False), nn.BatchNorm2d(1280)
        self.linear = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(torch.relu(self.bn1(self.conv1(x))))
        return self.linear(F.avg_pool2d(torch.relu(self.bn2(self.conv2(x))), 4).flatten(1))


class GreyCnn(nn.Module):
    """feature_extractor.conv1 to conv4, classifier.fc1 to fc3, for 1x28x28."""

    def __init__(self, *, classes: int = 10) -> None:
        super().__init__()
        sizes = {"conv1": (1, 32), "conv2": (32, 32), "conv3": (32, 64), "conv4": (64, 64)}
        self.feature_extractor = nn.ModuleDict({k: nn.Conv2d(a, b, 3) for k, (a, b) in sizes.items()})
        self.classifier = nn.ModuleDict(
            {"fc1": nn.Linear(1024, 200), "fc2": nn.Linear(200, 200), "fc3": nn.Linear(200, classes)}
        )

    def forward(self, x: Tensor) -> Tensor:
        for i in (1, 2, 3, 4):
            x = torch.relu(self.feature_extractor[f"conv{i}"](x))
            if i % 2 == 0:
                x = F.max_pool2d(x, 2)
        x = x.flatten(1)
        for name in ("fc1", "fc2"):
            x = torch.relu(self.classifier[name](x))
        return self.classifier["fc3"](x)


class Shift(nn.Module):
    """(x - mean) / std with the two as buffers of the given names."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], *, names: tuple[str, str]) -> None:
        super().__init__()
        self.names = names
        for name, values in zip(names, (mean, std), strict=True):
            self.register_buffer(name, torch.tensor(values).reshape(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        mean, std = (self.get_buffer(name) for name in self.names)
        return (x - mean) / std


def randomised(net: nn.Module, seed: int = 0) -> nn.Module:
    """In eval mode and float64, with weights and BatchNorm statistics that leave no two layers alike."""
    generator = Seed(seed).child("foreign").generator()
    net = net.double().eval()
    for name, tensor in net.state_dict().items():
        if not tensor.is_floating_point() or name.split(".")[-1] in ("mean", "std", "mu", "sigma"):
            continue
        if tensor.dim() > 1:
            tensor.normal_(0, (2 / tensor[0].numel()) ** 0.5, generator=generator)
        elif name.endswith(("running_var", "weight")):
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.normal_(0, 0.1, generator=generator)
    return net
