"""What is asked of a history besides whole records: statements, which each database answers."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, ColumnElement, Select, func, literal, or_, select, tuple_

from loragate.history.model import NEIGHBOURS, Glance, Outcome
from loragate.history.tables import RUNS, TRIALS

_NAME = (TRIALS.c.run, TRIALS.c.number)
_PLACE = (TRIALS.c.case, TRIALS.c.device)
_SOURCE = (*_PLACE, TRIALS.c.path_key)
_INPUTS = (*_SOURCE, TRIALS.c.draw)
# in which trials are counted together
_GROUP = (TRIALS.c.path, TRIALS.c.grouped, TRIALS.c.device)
_IS_RIGHT = TRIALS.c.outcome == Outcome.RIGHT.value


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
    """Older trials that were right, without which no page says anything worse. Those of a group
    with a failure are the n of its k of n. The first ones of a source end what was wrong before,
    and the last ones of a case and measure say that it was judged."""
    name = tuple_(*_NAME)
    return (
        (TRIALS.c.at < before)
        & _IS_RIGHT
        & tuple_(*_INPUTS).not_in(_several())
        & tuple_(*_GROUP).not_in(_failing())
        & name.not_in(_changes())
        & name.not_in(_last(_IS_RIGHT, *_PLACE, TRIALS.c.measure, columns=_NAME))
    )


def _several() -> Select[Any]:
    """Inputs that gave several results, each of them right."""
    results = func.count(TRIALS.c.digest.distinct())
    query = select(*_INPUTS).where(_IS_RIGHT, TRIALS.c.digest != "").group_by(*_INPUTS)
    return query.having(results > 1)


def _failing() -> Select[Any]:
    """Groups in which something was not right with the source that a machine has now, or with one
    that is not known."""
    now = _last(TRIALS.c.path_key != "", *_PLACE, columns=_SOURCE)
    failures = (Outcome.DIFFERENT.value, Outcome.WRONG.value)
    is_failure = or_(TRIALS.c.outcome.in_(failures), tuple_(*_INPUTS).in_(_several()))
    counts = or_(TRIALS.c.path_key == "", tuple_(*_SOURCE).in_(now))
    return select(*_GROUP).where(is_failure, counts).distinct()


def _changes() -> Select[Any]:
    """The trials of each machine with which the source of a case became another one."""
    order = (TRIALS.c.at, TRIALS.c.run, TRIALS.c.number)
    before = func.lag(TRIALS.c.path_key).over(
        partition_by=(RUNS.c.machine, *_PLACE), order_by=order
    )
    found = select(*_NAME, TRIALS.c.path_key, before.label("before")).join(RUNS)
    found_in = found.where(TRIALS.c.path_key != "").subquery()
    is_change = found_in.c.path_key.is_distinct_from(found_in.c.before)
    return select(*(found_in.c[column.name] for column in _NAME)).where(is_change)


def _last(
    which: ColumnElement[bool],
    *of: Column[Any],
    columns: tuple[Column[Any], ...],
) -> Select[Any]:
    """`columns` of the last trial of each machine for each value of `of`."""
    latest = (TRIALS.c.at.desc(), TRIALS.c.run.desc(), TRIALS.c.number.desc())
    place = func.row_number().over(partition_by=(RUNS.c.machine, *of), order_by=latest)
    found = select(*columns, place.label("place")).join(RUNS).where(which).subquery()
    return select(*(found.c[column.name] for column in columns)).where(found.c.place == 1)
