"""Evidence as text and figures, the same in every report. Pure; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from loragate.core.resources import Resources
from loragate.core.verdict import Judgement
from loragate.matrix.case_run import trial_name
from loragate.report.outcomes import CaseOutcome
from loragate.report.text import headline, one_line

# names of the figures of an oracle that measures an error
ERROR = "err"
THRESHOLD = "threshold"
RATIO = "ratio"
# figures that the reports show apart from the others
MEASURED = frozenset({ERROR, THRESHOLD, RATIO})

# a case that failed as the ledger of findings lists it
KNOWN = "known"

# records do not keep the order in which an oracle named the axes
_OUTSIDE_IN = ("step", "slot", "expert", "token", "row", "slice", "rank", "tile", "column")

_TRIALS_NAMED = 6


def outcome_name(case: CaseOutcome) -> str:
    """The outcome of a case in one word."""
    return KNOWN if case.is_known else case.verdict.value


def bad_trials(case: CaseOutcome) -> str:
    """Which of the trials of a case did not pass, as one sentence."""
    names = [trial_name(*trial) for trial in case.bad_trials]
    more = f" and {len(names) - _TRIALS_NAMED} more" if len(names) > _TRIALS_NAMED else ""
    which = f"{', '.join(names[:_TRIALS_NAMED])}{more}"
    return f"{len(names)} of {case.trials} trials did not pass: {which}"


def ratio(judgement: Judgement) -> float | None:
    """Error in units of its threshold, or None where the oracle measures no error.

    A ratio that the oracle reports comes first: it may have judged by another row than the one
    that it shows. Infinite rather than undefined.
    """
    reported = judgement.metrics.get(RATIO)
    if reported is not None:
        return math.inf if math.isnan(reported) else reported
    error, threshold = (judgement.metrics.get(name) for name in (ERROR, THRESHOLD))
    if error is None or threshold is None:
        return None
    if not (math.isfinite(error) and math.isfinite(threshold)):
        return math.inf
    if threshold == 0:
        return 0.0 if error == 0 else math.inf
    return error / threshold


def multiple(value: float) -> str:
    """A ratio with two digits: 0.042x, 3.1x, 260x."""
    if math.isinf(value):
        return "inf"
    if value >= 1e4 or 0 < value < 1e-3:
        return f"{value:.0e}x"
    return f"{value:.2g}x" if value < 10 else f"{value:.0f}x"


def figure(value: float) -> str:
    """A figure of an oracle: a count as an integer, a measure with three digits."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.3g}"


def limits(judgement: Judgement) -> tuple[tuple[str, str], ...]:
    """Error and threshold with their names, if the oracle reports them."""
    names = (("error", ERROR), ("threshold", THRESHOLD))
    return tuple(
        (title, figure(judgement.metrics[name]))
        for title, name in names
        if name in judgement.metrics
    )


def others(judgement: Judgement) -> tuple[tuple[str, str], ...]:
    """Names and values of the figures that neither `ratio` nor `limits` shows."""
    names = sorted(judgement.metrics.keys() - MEASURED)
    return tuple((one_line(name), figure(judgement.metrics[name])) for name in names)


def figures(judgement: Judgement) -> str:
    """All figures of a judgement: the error against its threshold first, then the others."""
    measured = ", ".join(f"{title} {value}" for title, value in limits(judgement))
    times = ratio(judgement)
    if times is not None:
        measured = f"{measured} ({multiple(times)})".lstrip()
    parts = [measured, *(f"{name} {value}" for name, value in others(judgement))]
    return ", ".join(part for part in parts if part)


def alike(judgements: Iterable[Judgement]) -> tuple[tuple[Judgement, ...], ...]:
    """Groups of judgements that read the same: one exception often stops every oracle."""
    groups: dict[tuple[object, ...], list[Judgement]] = {}
    for judgement in judgements:
        facts = (judgement.verdict, judgement.failure, headline(judgement.message))
        groups.setdefault((*facts, figures(judgement), place(judgement)), []).append(judgement)
    return tuple(map(tuple, groups.values()))


def place(judgement: Judgement) -> str:
    """Where the worst element lies, from the step down to the column."""
    order = {axis: number for number, axis in enumerate(_OUTSIDE_IN)}
    axes = sorted(judgement.where, key=lambda axis: (order.get(axis, len(order)), axis))
    return one_line(", ".join(f"{axis} {judgement.where[axis]}" for axis in axes))


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 0.0995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def growth(now: Resources, baseline: Resources | None) -> tuple[int, int, int] | None:
    """Registers, spills and shared bytes above the baseline; None without one."""
    if baseline is None:
        return None
    return (
        now.registers - baseline.registers,
        now.spills - baseline.spills,
        now.shared_bytes - baseline.shared_bytes,
    )
