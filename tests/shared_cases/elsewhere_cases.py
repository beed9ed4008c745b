"""A device that any machine has: its numbers are the CPU's, but a tensor on it cannot be mixed with one that is not.

Whoever forgets `device=` fails on it as on a GPU. It cannot show kernels, recordings, half precision or speed.
torch never forgets a device, so this runs in a process of its own: `python elsewhere_cases.py CASE ...`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "elsewhere"
MOVES = ("copy_", "_to_copy")  # what may read one device and write another
WRITES_ROWS = ("index_put_", "index_put", "_index_put_impl_")


class There(Tensor):
    """A tensor that says it is elsewhere; `here` holds its numbers."""

    here: Tensor

    @staticmethod
    def __new__(cls: type[There], here: Tensor) -> There:
        like = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        made = Tensor._make_wrapper_subclass(cls, here.size(), layout=here.layout, device=f"{NAME}:0", **like)
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return done(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Numbers for Python; torch does not let a subclass do it."""
        return self.here.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"elsewhere({self.here})"


class Elsewhere(TorchDispatchMode):
    """Within it tensors can be made on the device."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return done(func, args, kwargs or {})


def mixed(name: str, args: Any, tensors: list[Tensor]) -> bool:
    """Whether CUDA would refuse: numbers alone may lie here, and so may the indices of a tensor that is there."""
    there = [isinstance(one, There) for one in tensors if one.dim() or isinstance(one, There)]
    if name in MOVES:
        return False
    if name == "index" or name in WRITES_ROWS:
        written = name != "index" and isinstance(args[2], There) != isinstance(args[0], There) and args[2].dim() > 0
        return written or (any(there) and not isinstance(args[0], There))
    return any(there) and not all(there)


def done(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation, on the CPU; what comes out is where it belongs."""
    name = func._schema.name.split("::")[1]
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [one for one in tensors if isinstance(one, There)]
    if mixed(name, args, tensors):
        lost = [tuple(one.shape) for one in tensors if not isinstance(one, There)]
        raise RuntimeError(f"devices are mixed: {func} of a tensor elsewhere and of {lost} here")
    asked = kwargs.get("device")
    home = torch.device(asked).type == NAME if asked is not None else bool(there)
    plain_args, plain_kwargs = tree_map(lambda leaf: leaf.here if isinstance(leaf, There) else leaf, (args, kwargs))
    found = func(*plain_args, **(plain_kwargs | ({} if asked is None else {"device": "cpu"})))
    if name.endswith("_") and isinstance(args[0], Tensor):
        return args[0]  # written in place
    return tree_map(lambda leaf: There(leaf) if isinstance(leaf, Tensor) else leaf, found) if home else found


def moved(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.tensor and torch.as_tensor make numbers here and send them; with a device of its own torch asks nobody."""
    return lambda *args, device=None, **kwargs: (
        make(*args, **kwargs) if device is None else make(*args, **kwargs).to(device)
    )


class Generator(torch.Generator):
    """One of the CPU, whatever device is named."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")


@contextmanager
def registered() -> Iterator[None]:
    """The device exists, flatrock's `auto` means it."""
    from flatrock.core import device

    backend_registration._setup_privateuseone_for_python_backend(NAME)
    torch.elsewhere.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    torch.tensor, torch.as_tensor = moved(torch.tensor), moved(torch.as_tensor)
    torch.Generator = Generator  # type: ignore[misc]
    device.pick_device = lambda name: torch.device(f"{NAME}:0" if str(name) == "auto" else name)
    with Elsewhere():
        yield


def refusals() -> None:
    """The device is strict about what a GPU is strict about, and about nothing else."""
    x, rows, mask = torch.zeros(3, 2, device=NAME), torch.tensor([0, 2]), torch.tensor([True, False, True])
    assert x.device.type == NAME
    assert (x + 1 + torch.tensor(2.0)).tolist() == [[3.0, 3.0]] * 3
    assert x[rows].device.type == x[mask].device.type == NAME
    x[rows] = torch.ones(2, 2, device=NAME)
    assert x.cpu().sum() == 4
    bad: list[Callable[[], object]] = [
        lambda: x + torch.zeros(3, 2),
        lambda: torch.zeros(3, 2)[rows.to(NAME)],
        lambda: x.__setitem__(rows, torch.ones(2, 2)),
        lambda: torch.cat([x, torch.zeros(1, 2)]),
        lambda: nn.Linear(2, 2)(x),
        lambda: torch.where(mask, x.sum(1), 0.0),
    ]
    for number, attempt in enumerate(bad):
        try:
            attempt()
        except RuntimeError as error:
            assert "mixed" in str(error), error
        else:
            raise AssertionError(f"attempt {number} was not refused")


def evaluations() -> None:
    """Every attack, under both norms, with votes: the very results of the CPU."""
    import flatrock

    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)).eval()
    x = torch.rand(6, 1, 6, 6)
    y = net(x).argmax(1)
    attacks: list[Any] = ["fgsm", "pgd-2", "cw-2", "kl-pgd-2", "mt-2", "langevin-2", "guided"]
    attacks += [{"name": name, "steps": 4} for name in ("apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t")]
    attacks += [{"name": "square", "queries": 20}]
    for threat in (flatrock.Linf(0.1), flatrock.L2(0.5)):
        rays = [{"name": "rays", "queries": 40}] if threat.norm == "linf" else []
        found = []
        for where in ("cpu", NAME):
            result = flatrock.evaluate(
                net.to(where), x, y, threat, attacks=attacks + rays, batch_size=4, votes=3, progress=None
            )
            found.append({name: flags.tolist() for name, flags in result.flags.items()})
        net.cpu()
        assert found[0] == found[1]
        assert len(found[0]) >= len(attacks)


def trainings(*names: str) -> None:
    """Recipes train, select, average, write into runs/ and are read again."""
    import flatrock

    for name in names:
        run = flatrock.train(name, train={"epochs": 2}, data={"limit": 640}, folder=Path("runs") / name, progress=None)
        model = flatrock.load(run.folder, device="auto")
        assert {tensor.device.type for tensor in model.state_dict().values()} == {NAME}


def choices() -> None:
    """What no recipe of the library asks for: AdamW, SGLD, clipped gradients, batches in parts; stopped and resumed."""
    import flatrock

    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    small: dict[str, Any] = {"data": {"limit": 320}, "attack": {"steps": 2}, "progress": None}
    small |= {"threat": {"eps": 0.02}, "train": {"epochs": 2, "clip_norm": 0.5, "micro_batch": 24}}
    for optimizer in ({"name": "adamw", "lr": 0.01}, {"name": "sgld", "noise": 1e-3}):
        how = {**small, "optimizer": optimizer, "folder": Path("runs") / str(optimizer["name"])}
        with suppress(KeyboardInterrupt):
            flatrock.train("digits_trades_awp_rat_swa", **how, on_epoch=stop)
        run = flatrock.train("digits_trades_awp_rat_swa", **how, resume=True)
        assert [record.terms["grad_norm"] > 0 for record in run.records] == [True, True]


def measurements() -> None:
    """The commands that look at a trained network."""
    import flatrock
    from flatrock.cli.main import app

    short = {
        "landscape": "--points 3 --directions 1 --images 20 --attack pgd-1",
        "curvature": "--images 20 --probes 2 --runs 1 --steps 3 --top 1 --awp-steps 1 --trace hutch++",
        "certify": "--sigma 0.25 --n 200 --limit 5",
    }
    run = flatrock.train("digits_standard", train={"epochs": 2}, folder="runs/one", progress=None)
    for command, options in short.items():
        assert app([command, str(run.folder), *options.split()], standalone_mode=False) in (None, 0)
        assert list(Path(run.folder).glob(f"{command[:5]}*.json")), command


CASES: dict[str, Callable[..., None]] = {
    "refusals": refusals,
    "evaluations": evaluations,
    "trainings": trainings,
    "choices": choices,
    "measurements": measurements,
}

if __name__ == "__main__":
    with registered():
        CASES[sys.argv[1]](*sys.argv[2:])
