"""What is asked of a history besides whole records: statements, which each database answers."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Select, func, literal, select, tuple_

from loragate.history.model import NEIGHBOURS, Glance, Outcome
from loragate.history.tables import TRIALS


def glances_since(since: float) -> Select[Any]:
    """A row has the fields of a `Glance`. The oldest come first."""
    # a name of JSON; within a text its quotes would be escaped
    is_alone = ~TRIALS.c.conditions.contains(literal(f'"{NEIGHBOURS}":'))
    query = select(*(TRIALS.c[name] for name in Glance._fields[:-1]), is_alone)
    query = query.where(TRIALS.c.at >= since)
    return query.order_by(TRIALS.c.at, TRIALS.c.run, TRIALS.c.number)


def path_keys() -> Select[Any]:
    """Each case with each key of its path and the time of its last trial, the oldest first."""
    last = func.max(TRIALS.c.at)
    query = select(TRIALS.c.case, TRIALS.c.path_key).where(TRIALS.c.path_key != "")
    return query.group_by(TRIALS.c.case, TRIALS.c.path_key).order_by(last)


def is_dispensable(before: float) -> ColumnElement[bool]:
    """Older trials that were right, but for those with inputs that gave several results, each of
    them right."""
    is_right = TRIALS.c.outcome == Outcome.RIGHT.value
    inputs = (TRIALS.c.case, TRIALS.c.draw)
    results = func.count(TRIALS.c.digest.distinct())
    several = select(*inputs).where(is_right, TRIALS.c.digest != "").group_by(*inputs)
    several = several.having(results > 1)
    return (TRIALS.c.at < before) & is_right & tuple_(*inputs).not_in(several)
