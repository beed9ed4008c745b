"""A stored result as rows have it: the verdicts on every sample, and what says how to ask again."""

from __future__ import annotations

from torch import Tensor

from flatrock.core.records import Result
from flatrock.core.rows import Score

ASKED = ("commit", "torch", "device", "time", "seed", "precision", "batch_size")
PERHAPS = ("surrogate", "neighbours", "data", "samples_digest")  # not of every result


def verdicts(result: Result) -> dict[str, Tensor]:
    """What stood on the clean input, under each attack on its own, and under each plan as a whole."""
    plans = {plan: labels[-1] for plan, labels in result.plans.items()}
    return {name: result.flags[plans.get(name, name)] for name in ("clean", *result.per_attack)}


def score_of(result: Result, digest: str, where: str = "") -> Score:
    """The score of a result, whose file has this digest; of a further one `where` it is not as the recipe's own."""
    about = dict(result.provenance)
    certificate = {k: about.get(k) for k in ASKED}
    return Score(
        epoch=int(about["epoch"]),
        right=verdicts(result),
        seconds={name: float(cost["seconds"]) for name, cost in result.costs.items() if "seconds" in cost},
        findings=tuple(f"{f.code}: {f.message}" for f in result.findings),
        marks=tuple(result.marks),
        provenance=certificate | {k: about[k] for k in PERHAPS if k in about},
        result=digest,
        distances={name: mean for name, mean in result.mean_distance.items() if mean is not None},
        where=where,
    )
