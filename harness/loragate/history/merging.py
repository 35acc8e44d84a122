"""What one file of SQLite takes over from another one that is attached as `other`, and whether its
trials can be read."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from sqlalchemy import Connection

from loragate.history.model import HistoryError, Outcome, Purpose
from loragate.history.tables import PATHS, RUNS, TRIALS

_CHOICES: Mapping[str, type[StrEnum]] = MappingProxyType({"outcome": Outcome, "purpose": Purpose})
_OBJECTS = ("conditions", "health")


def check_trials(connection: Connection, database: str, name: str) -> None:
    """A trial that cannot be read would make the history that takes it one that cannot be read.
    Raises HistoryError, which names the first one; `name` is what it calls the history."""
    wrong = [
        f"{field} NOT IN ({', '.join(repr(choice.value) for choice in choices)})"
        for field, choices in _CHOICES.items()
    ]
    wrong += [f"NOT (json_valid({field}) AND json_type({field}) = 'object')" for field in _OBJECTS]
    wrong.append("typeof(at) NOT IN ('real', 'integer')")
    query = f"SELECT run, number FROM {database}.trials WHERE {' OR '.join(wrong)} LIMIT 1"
    found = connection.exec_driver_sql(query).first()
    # of reading
    connection.rollback()
    if found is not None:
        raise HistoryError(f"{name}: trials with run {found[0]}, number {found[1]}: is no record")


def copy_attached(connection: Connection) -> int:
    """Add all records; what is known stays, but for the end of a run. Returns how many trials were
    new: to count all of them before and after would take a fifth of the time."""
    new = 0
    for table in (RUNS, PATHS, TRIALS):
        names = ", ".join(f'"{column.name}"' for column in table.columns)
        new = connection.exec_driver_sql(
            f"INSERT OR IGNORE INTO main.{table.name} ({names}) "
            f"SELECT {names} FROM other.{table.name}"
        ).rowcount
    connection.exec_driver_sql(
        "UPDATE main.scan_runs SET finished_at = (SELECT o.finished_at "
        "FROM other.scan_runs o WHERE o.uid = scan_runs.uid) "
        "WHERE finished_at IS NULL"
    )
    return new
