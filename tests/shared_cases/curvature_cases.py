"""Small networks in float64 and their dense Hessians, for the tests of curvature."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian

from flatrock.core.rng import Seed, kept_global_rng


def dense_net(*, scale: float = 1.0) -> nn.Module:
    """Two hidden layers with ReLU, 86 parameters."""
    with kept_global_rng(seed=Seed(3)):
        net = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(scale)
    return net


def conv_net() -> nn.Module:
    """A convolution, BatchNorm with statistics that are not 0 and 1, GELU and a linear layer."""
    with kept_global_rng(seed=Seed(4)):
        net = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4)
        ).double()
        net(torch.rand(30, 1, 6, 6).double())
    return net


def samples(shape: tuple[int, ...], classes: int, n: int = 24) -> tuple[Tensor, Tensor]:
    gen = Seed(5).child("samples").generator()
    return torch.rand(n, *shape, generator=gen, dtype=torch.float64), torch.randint(classes, (n,), generator=gen)


CASES = {"dense": (dense_net, (3,), 3), "conv": (conv_net, (1, 6, 6), 4)}


def dense_hessian(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """By torch.func, w.r.t. all parameters of the net in eval mode, in their order."""
    was = net.training
    net.eval()
    shapes = {name: p.shape for name, p in net.named_parameters()}
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])

    def loss(vector: Tensor) -> Tensor:
        parts = vector.split([s.numel() for s in shapes.values()])
        weights = {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}
        return F.cross_entropy(functional_call(net, weights, (x,)), y)

    found = hessian(loss)(flat)
    net.train(was)
    return found


def layer_blocks(net: nn.Module, dense: Tensor) -> dict[str, Tensor]:
    """Diagonal blocks by module."""
    found, start = {}, 0
    for name, module in net.named_modules():
        size = sum(p.numel() for p in module.parameters(recurse=False))
        if size:
            found[name] = dense[start : start + size, start : start + size]
            start += size
    assert start == len(dense)
    return found


def symmetric(values: Tensor, *, seed: int = 0) -> Tensor:
    """A full matrix with these eigenvalues."""
    gen = Seed(seed).child("turn").generator()
    turn = torch.linalg.qr(torch.randn(len(values), len(values), generator=gen, dtype=torch.float64))[0]
    return turn @ torch.diag(values.double()) @ turn.mT
