"""The tables of a history in a database: made where there are none, else brought up to date."""

from __future__ import annotations

from sqlalchemy import Connection, func, insert, inspect, select, text, update

from loragate.history import tables
from loragate.history.model import HistoryError
from loragate.history.tables import METADATA, SCHEMA_TABLE


def bring_up_to_date(connection: Connection, name: str) -> None:
    """Within a transaction of the caller. Raises HistoryError for a database of something else, or
    of a newer version; `name` says which one."""
    found = set(inspect(connection).get_table_names())
    if found and SCHEMA_TABLE.name not in found:
        raise HistoryError(f"{name} is a database, but no history")
    if not found:
        METADATA.create_all(connection)
        connection.execute(insert(SCHEMA_TABLE).values(version=tables.SCHEMA))
        return
    missing = sorted(METADATA.tables.keys() - found)
    if missing:
        raise HistoryError(f"{name} lacks the table {', '.join(missing)}")
    _upgrade(connection, name)


def _upgrade(connection: Connection, name: str) -> None:
    version = connection.scalar(select(func.max(SCHEMA_TABLE.c.version)))
    if version is None:
        raise HistoryError(f"{name} has a table of its schema, and no schema in it")
    # SQLite keeps a text in a column of numbers
    if not isinstance(version, int) or version < 1:
        raise HistoryError(f"{name} has schema {version!r}, and must have one from 1 up")
    if version > tables.SCHEMA:
        raise HistoryError(
            f"{name} has schema {version}; this version of loragate reads up to "
            f"{tables.SCHEMA}: update loragate, or name another history"
        )
    for step in range(version, tables.SCHEMA):
        for statement in tables.UPGRADES[step]:
            connection.execute(text(statement))
    connection.execute(update(SCHEMA_TABLE).values(version=tables.SCHEMA))
