"""What to doubt about a run that has ended: its averaged weights, its best epoch, its times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flatrock.core.chance import far_below, guessed
from flatrock.core.neighbours import told
from flatrock.core.runs import EpochRecord, best_record


def doubts(records: Sequence[EpochRecord], *, metric: str, samples: int, classes: int) -> dict[str, str]:
    """What the epochs of a run say against it, by code; they were chosen by `metric` on so many samples."""
    found = {
        "T09": _average(records, metric, samples),
        "T10": _guesses(records, samples, classes),
        "T11": _beside_others(records),
    }
    return {code: text for code, text in found.items() if text}


def coded(findings: Mapping[str, str], page: str) -> list[str]:
    """Findings by code as lines that say where more is told."""
    return [f"{code} {why} (docs/{page}.md)" for code, why in findings.items()]


def _average(records: Sequence[EpochRecord], metric: str, samples: int) -> str:
    """Averaged weights that all predict one class, or are far worse than the raw ones at their best."""
    raw, mean = (best_record(records, key) for key in ("best_epoch", "average_best_epoch"))
    probed = any(record.average_robust is not None for record in records)
    if raw is None or not probed:
        return ""
    if mean is None:
        return (
            "the averaged weights have no best epoch: every one predicted a single class, so evaluations, which take "
            "them, are refused; evaluate the raw weights with --which best (in Python: which='best')"
        )
    low, high = getattr(mean, f"average_{metric}"), getattr(raw, metric)
    if low is None or high is None or not far_below(low, high, samples):
        return ""
    return (
        f"the averaged weights, which evaluations take, are far worse than the raw ones: at best {metric} "
        f"{100 * low:.2f} (epoch {mean.epoch}), raw {100 * high:.2f} (epoch {raw.epoch}) on {samples} samples; "
        "evaluate the raw weights with --which best (in Python: which='best'), or average with "
        "flatness.swa.ramp=true, a smaller decay or a later start"
    )


def _guesses(records: Sequence[EpochRecord], samples: int, classes: int) -> str:
    """A best epoch that is right as often as guesses are, though a later one is right far more often."""
    best, most = best_record(records, "best_epoch"), guessed(classes, samples)
    if best is None or best.clean is None or most >= 1 or best.clean > most:
        return ""
    later = [r for r in records if r.epoch > best.epoch and r.clean is not None and not r.collapsed]
    top = max(later, key=lambda record: record.clean or 0.0, default=None)
    if top is None or top.clean is None or not far_below(best.clean, top.clean, samples):
        return ""
    return (
        f"the best epoch, {best.epoch}, has clean {100 * best.clean:.2f} on {samples} samples, where guesses reach up "
        f"to {100 * most:.2f}, and epoch {top.epoch} has {100 * top.clean:.2f}: it was chosen for a robust accuracy "
        f"({100 * (best.robust or 0.0):.2f}) that a model which knows nothing has; look at --which last, and at how it "
        "was trained: nothing robust was learnt"
    )


def _beside_others(records: Sequence[EpochRecord]) -> str:
    """Epochs whose times are not those of a GPU of their own."""
    looks = [record.neighbours for record in records if record.neighbours is not None]
    found, shared = told(looks), sum(map(bool, looks))
    if not found:
        return ""
    return f"{found} in {shared} of {len(looks)} epochs looked at: weights do not depend on it, times may"
