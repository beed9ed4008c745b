"""flatrock: robust image classifiers in flat minima, measured honestly and fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from flatrock.attacks.catalog import attack
from flatrock.attacks.craft import check_given
from flatrock.core.errors import (
    ConfigError,
    DataError,
    FlatrockError,
    ModelError,
    StateError,
    ThreatError,
    TrainingError,
)
from flatrock.core.progress import Progress
from flatrock.core.provenance import VERSION as __version__
from flatrock.core.records import Result
from flatrock.core.runs import EpochRecord, Run
from flatrock.core.threat import L2, Linf
from flatrock.evaluation.evaluate import evaluate as _evaluate
from flatrock.models.catalog import create_model

if TYPE_CHECKING:
    from flatrock.core.device import Devices
    from flatrock.models.classifier import Classifier
    from flatrock.workflows.reproduce import Outcome
    from flatrock.workflows.sweep import Swept

__all__ = [
    "L2",
    "ConfigError",
    "DataError",
    "FlatrockError",
    "Linf",
    "ModelError",
    "Result",
    "Run",
    "StateError",
    "ThreatError",
    "TrainingError",
    "__version__",
    "attack",
    "create_model",
    "evaluate",
    "evaluate_run",
    "load",
    "open_run",
    "reproduce",
    "sweep",
    "train",
]


_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextmanager
def _listener(progress: object) -> Iterator[Progress | None]:
    """Who is told how far it is: the console if `progress` is True, nobody if None or False."""
    if progress is True:
        from flatrock.cli.console import TerminalProgress  # here: importing flatrock needs torch and numpy alone

        with TerminalProgress() as bar:
            yield bar
    elif progress is None or progress is False:
        yield None
    elif isinstance(progress, type) or not all(hasattr(progress, name) for name in ("begin", "advance", "end", "say")):
        raise ConfigError(
            "progress must be True, for a bar on the console, or a listener, an object with the methods begin, "
            f"advance, end and say (flatrock.core.progress.Progress), got {progress!r}"
        )
    else:
        yield progress  # type: ignore[misc]


def _listened(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """The same function, which also takes progress=True."""

    @wraps(call)
    def told(*args: _P.args, **options: _P.kwargs) -> _R:
        check_given(*args[1:2])  # first: a loader in the place of x and y would be one argument too few
        with _listener(options.get("progress")) as listener:
            return call(*args, **(options | {"progress": listener}))  # type: ignore[arg-type]

    told.__module__ = __name__  # where it is found again by those who send it to another process
    told.__doc__ = f"{getdoc(call)}\n\n`progress=True` shows a bar on the console; None: nobody is told.\n"
    return told


evaluate = _listened(_evaluate)


def train(
    recipe: str | Path | Run,
    *,
    progress: Progress | bool | None = None,
    on_epoch: Callable[[EpochRecord], object] | None = None,
    **overrides: Any,
) -> Run:
    """Train a recipe (a library name or a YAML file) and return the run.

    Overrides are recipe keys: `train={"epochs": 3}`, `train__epochs=3` or `**{"train.epochs": 3}`. The keywords folder,
    data_dir, download, device, resume and overwrite steer the run itself; see `flatrock.workflows.train`. A run, or its
    folder, may stand for the recipe to be continued: `train("runs/digits_at", resume=True)`.
    `progress=True` shows a bar on the console; a listener of one's own is a `flatrock.core.progress.Progress`.
    `on_epoch` is called with the record of every epoch once that is stored; what it raises interrupts the run, which
    can be resumed, and is raised here.
    """
    from flatrock.workflows.train import train_recipe  # here, so that importing flatrock needs torch and numpy alone

    with _listener(progress) as listener:
        return train_recipe(recipe, progress=listener, on_epoch=on_epoch, **overrides)


def reproduce(
    *names: str,
    runs_dir: str | Path = "runs",
    out: str | Path | None = None,
    seeds: Sequence[int] = (),
    data_dir: str | Path | None = None,
    download: bool = False,
    device: Devices = "auto",
    limit_minutes: float | None = None,
    progress: Progress | bool | None = None,
    **overrides: Any,
) -> Outcome:
    """Train, evaluate and collect recipes into one table, beside the papers' figures: `flatrock reproduce` as a call.

    Names are those of recipes, of files, patterns such as "digits_*" or tables such as "rat_table1"; overrides are
    recipe keys, as in `train`. Rows are written to `out` (runs_dir/reproduce.json), the page beside it. What is done is
    skipped; a row that fails is told in `Outcome.problems` and ends no other.
    """
    if odd := [name for name in names if not isinstance(name, str)]:
        raise ConfigError(f"names are text, one by one, got {odd[0]!r}; write reproduce('a', 'b') or reproduce(*names)")
    from flatrock.cli.reproduce import Told
    from flatrock.cli.reproduce_table import prepare
    from flatrock.workflows.train import written

    table = prepare(
        names,
        written(overrides),
        runs_dir=Path(runs_dir),
        out=None if out is None else Path(out),
        seeds=seeds,
        data_dir=None if data_dir is None else Path(data_dir),
        download=download,
        device=device,
    )
    with _listener(progress) as bar:
        told = Told(table.rows) if progress is True else None
        outcome = table.make(limit_minutes=limit_minutes, progress=bar, listener=told)
    table.report()
    return outcome


def sweep(
    recipe: str | Path,
    grid: Mapping[str, Sequence[Any]],
    *,
    seeds: Sequence[int] = (),
    runs_dir: str | Path | None = None,
    shard: str | None = None,
    csv: str | Path | None = None,
    data_dir: str | Path | None = None,
    download: bool = False,
    device: Devices = "auto",
    limit_minutes: float | None = None,
    progress: Progress | bool | None = None,
    **overrides: Any,
) -> Swept:
    """Train and evaluate a recipe with every combination of values, for every seed: `flatrock sweep` as a call.

    `grid` has the values of each key, `{"optimizer.lr": [0.05, 0.1], "threat.eps": ["4/255", "8/255"]}`; overrides are
    keys that all have in common, as in `train`. Runs lie in `runs_dir` (runs/<recipe>-sweep), in folders named after
    what differs; what is done is skipped. `Swept.settings` has rows by setting, of all processes that share the sweep,
    `Swept.differences` how far each setting is from the first, paired by seed and by sample.
    """
    from flatrock.cli.sweep import Told, check_places
    from flatrock.workflows.sweep import Shard, make_sweep
    from flatrock.workflows.sweep_plan import plan_sweep
    from flatrock.workflows.train import written

    where: dict[str, Any] = {"data_dir": None if data_dir is None else Path(data_dir), "download": download}
    part, target = None if shard is None else Shard.of(shard), None if csv is None else Path(csv)
    values, place = written(dict(grid)), None if runs_dir is None else Path(runs_dir)
    plan = plan_sweep(recipe, values, written(overrides), seeds=seeds, runs_dir=place, **where)
    check_places(plan, target, device)
    with _listener(progress) as bar:
        told = Told(plan.runs if part is None else part.part(plan.runs)) if progress is True else None
        how: dict[str, Any] = {"limit_minutes": limit_minutes, "progress": bar, "listener": told, "device": device}
        return make_sweep(plan, shard=part, csv=target, **how, **where)


def load(source: str | Path | Run, *, which: str = "auto", device: str = "cpu") -> Classifier:
    """The trained model of a run folder or of a checkpoint file, in eval mode.

    `which` is best, last, average-best or average-last; auto = the best epoch, averaged if the recipe averages.
    """
    from flatrock.recipes.restore import load as restore

    return restore(source, which=which, device=device)


def open_run(folder: str | Path) -> Run:
    """A run as it stands on disk: its records, status and findings; its weights need not be there."""
    from flatrock.engine.folder import RunFolder

    return RunFolder(Path(folder)).run()


def evaluate_run(
    source: str | Path | Run,
    *,
    store: bool = True,
    data_dir: str | Path | None = None,
    progress: Progress | bool | None = None,
    **options: Any,
) -> Result:
    """Evaluate a run, or one of its checkpoints, on its recipe's test set: `flatrock eval` as a call.

    The result is stored in the run's folder, as the command does it, unless `store` is False. Options are which, norm,
    eps, attacks (default: the recipe's), surrogate, limit, first, batch_size, precision, votes, doubt,
    keep_adversarial, resume, device and seed; see `flatrock.workflows.evaluate.evaluate_run`.
    """
    from flatrock.workflows.evaluate import evaluate_run as run_evaluated
    from flatrock.workflows.evaluate import store_result

    asked = {"doubt": True, "journal": store, "data_folder": None if data_dir is None else Path(data_dir)} | options
    with _listener(progress) as listener:
        result = run_evaluated(source, **asked, progress=listener)
    if store:
        store_result(source, result)
    return result
