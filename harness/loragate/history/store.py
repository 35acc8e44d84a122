"""A history in a database: SQLite in a file, or whatever SQLAlchemy opens by a URL.

Each trial is a transaction of its own, so that a killed writer loses at most the one that it was
writing. SQLite writes ahead (WAL), and several processes may append at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    Connection,
    CursorResult,
    Engine,
    Insert,
    Table,
    delete,
    func,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert as insert_postgresql
from sqlalchemy.dialects.sqlite import insert as insert_sqlite
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError

from loragate.history import tables
from loragate.history.address import engine_of
from loragate.history.merging import check_trials, copy_attached
from loragate.history.model import (
    DatabaseFailedError,
    Glance,
    HistoryError,
    PathFiles,
    ScanRun,
    TrialRecord,
)
from loragate.history.queries import glances_since, is_dispensable, path_keys
from loragate.history.schema import bring_up_to_date
from loragate.history.tables import PATHS, RUNS, TRIALS

_BATCH = 10_000
T = TypeVar("T")


def open_history(where: str | Path) -> History:
    """The history in a SQLite file, which is made where there is none, or at a URL as
    `postgresql+psycopg://user@host/name`.

    Raises HistoryError for a URL that leads nowhere, a database of something else, or a history
    that a newer version has written. An older one is brought up to date. Raises DatabaseFailedError
    where a server or a disk does not answer, which may be otherwise in a minute.
    """
    engine = engine_of(where)
    name = engine.url.render_as_string(hide_password=True).removeprefix("sqlite:///")
    history = History(engine, name)
    try:
        history.prepare()
    except OperationalError as error:
        raise DatabaseFailedError(f"history {name}: {_reason(error)}") from error
    except SQLAlchemyError as error:
        raise HistoryError(f"history {name}: {_reason(error)}") from error
    return history


class History:
    """An open history. For one thread; close it, or use it as a context."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self.name = engine, name
        self._writer: Connection | None = None

    @property
    def _file(self) -> str | None:
        """The file of a history in SQLite."""
        return self._engine.url.database if self._engine.dialect.name == "sqlite" else None

    def __enter__(self) -> History:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._engine.dispose()

    def prepare(self) -> None:
        """Make the tables where there are none, or bring them up to date. Raises HistoryError."""
        with self._engine.begin() as connection:
            if self._engine.dialect.name == "sqlite":
                # two processes may make the same file
                connection.execute(text("BEGIN IMMEDIATE"))
            bring_up_to_date(connection, self.name)

    def add_run(self, run: ScanRun) -> None:
        """Add a run; the end of one that is known is filled in."""
        with self._writing() as connection:
            self._add_run(connection, run)

    def add(self, trial: TrialRecord) -> None:
        """Add a trial at once: it is kept, whatever happens to this process. A trial that is
        known stays as it is. Raises HistoryError for a trial of an unknown run."""
        try:
            with self._writing() as connection:
                connection.execute(self._adding(TRIALS), tables.row_of(trial))
        except IntegrityError as error:
            raise HistoryError(f"{self.name} has no run {trial.run}") from error

    def add_path(self, path: PathFiles) -> None:
        """Add the files of a path; what is known stays."""
        with self._writing() as connection:
            connection.execute(self._adding(PATHS), tables.path_row_of(path))

    def paths(self) -> tuple[PathFiles, ...]:
        """The files of all paths, in the order of their keys."""
        query = select(PATHS).order_by(PATHS.c.path_key)
        with self._reading() as connection:
            return tuple(self._records(tables.path_of, PATHS, connection.execute(query)))

    def runs(self) -> tuple[ScanRun, ...]:
        """All runs, the oldest first."""
        query = select(RUNS).order_by(RUNS.c.started_at, RUNS.c.uid)
        with self._reading() as connection:
            return tuple(self._records(tables.run_of, RUNS, connection.execute(query)))

    def last_of(self, machine: str) -> float | None:
        """When the last run of a machine began, or its last trial ended; None without a run."""
        trial = select(func.max(TRIALS.c.at)).join(RUNS).where(RUNS.c.machine == machine)
        run = select(func.max(RUNS.c.started_at)).where(RUNS.c.machine == machine)
        with self._reading() as connection:
            found = [connection.scalar(query) for query in (trial, run)]
        return max((at for at in found if at is not None), default=None)

    def trials(self, *, since: float = 0.0) -> Iterator[TrialRecord]:
        """The trials from a time on, the oldest first."""
        query = select(TRIALS).where(TRIALS.c.at >= since)
        query = query.order_by(TRIALS.c.at, TRIALS.c.run, TRIALS.c.number)
        with self._reading() as connection:
            rows = connection.execution_options(yield_per=_BATCH).execute(query)
            yield from self._records(tables.trial_of, TRIALS, rows)

    def glances(self, *, since: float) -> Iterator[Glance]:
        """What plans need of the trials from a time on, the oldest first: ten times as fast as
        whole records. Raises HistoryError for a trial that is no record."""
        with self._reading() as connection:
            if self._file:
                check_trials(connection, "main", self.name)
            rows = connection.execution_options(yield_per=_BATCH).execute(glances_since(since))
            try:
                yield from map(tables.glance_of, rows)
            except ValueError as error:
                raise HistoryError(f"{self.name}: a trial is no record: {error}") from error

    def last_path_keys(self) -> dict[str, str]:
        """The key of the path of each case when it was traced last."""
        with self._reading() as connection:
            return {row.case: row.path_key for row in connection.execute(path_keys())}

    def count(self) -> int:
        """How many trials there are."""
        with self._reading() as connection:
            return connection.scalar(select(func.count()).select_from(TRIALS)) or 0

    def check(self) -> None:
        """Raises HistoryError for a record that `merge` refuses."""
        self.runs(), self.paths()
        if self._file:
            with self._reading() as connection:
                check_trials(connection, "main", self.name)

    def merge(self, other: History) -> int:
        """Add what `other` has and this one has not; returns how many trials that was."""
        try:
            if self._file and other._file:
                other.check()
                return self._merge_file(other._file, other.name)
            rows = map(tables.row_of, other.trials())
            return self._merge(other.runs(), other.paths(), rows)
        except IntegrityError as error:
            raise HistoryError(f"{other.name}: a trial belongs to a run that is unknown") from error

    def take(
        self,
        runs: Iterable[ScanRun],
        paths: Iterable[PathFiles],
        trials: Iterable[TrialRecord],
    ) -> int:
        """Add records, as `merge` does. Raises HistoryError for a trial of an unknown run."""
        try:
            return self._merge(runs, paths, map(tables.row_of, trials))
        except IntegrityError as error:
            raise HistoryError(f"{self.name}: a trial belongs to a run that is unknown") from error

    def _merge(
        self,
        runs: Iterable[ScanRun],
        paths: Iterable[PathFiles],
        rows: Iterable[dict[str, Any]],
    ) -> int:
        before = self.count()
        statement, rows = self._adding(TRIALS), iter(rows)
        # all of it or nothing
        with self._writing() as connection:
            for run in runs:
                self._add_run(connection, run)
            for path in paths:
                connection.execute(self._adding(PATHS), tables.path_row_of(path))
            while batch := list(islice(rows, _BATCH)):
                connection.execute(statement, batch)
        return self.count() - before

    def _merge_file(self, other: str, name: str) -> int:
        """As `merge`, within SQLite: five times as fast as through this process."""
        with self._reading() as connection:
            connection.exec_driver_sql("ATTACH DATABASE ? AS other", (other,))
            # SQLite has no transaction yet, SQLAlchemy thinks that it has
            connection.commit()
            try:
                check_trials(connection, "other", name)
                with self._writing_by(connection):
                    return copy_attached(connection)
            finally:
                connection.exec_driver_sql("DETACH DATABASE other")

    def prune(self, *, before: float) -> int:
        """Remove older trials that were right, and the runs that are left without trials. Returns
        how many trials were removed. What was not right stays: it says since when something is
        wrong. So do those that were right and without which a page would say something worse."""
        empty = RUNS.c.uid.not_in(select(TRIALS.c.run)) & (RUNS.c.started_at < before)
        with self._writing() as connection:
            removed = connection.execute(delete(TRIALS).where(is_dispensable(before))).rowcount
            connection.execute(delete(RUNS).where(empty))
        return removed

    def _add_run(self, connection: Connection, run: ScanRun) -> None:
        connection.execute(self._adding(RUNS), tables.row_of(run))
        if run.finished_at is not None:
            ended = update(RUNS).where(RUNS.c.uid == run.uid, RUNS.c.finished_at.is_(None))
            connection.execute(ended.values(finished_at=run.finished_at))

    def _adding(self, table: Table) -> Insert:
        if self._engine.dialect.name == "sqlite":
            return insert_sqlite(table).on_conflict_do_nothing()
        return insert_postgresql(table).on_conflict_do_nothing()

    def _records(
        self, of: Callable[[Mapping[str, Any]], T], table: Table, found: CursorResult[Any]
    ) -> Iterator[T]:
        """Raises HistoryError, which names the row, for one that is no record."""
        names = tuple(found.keys())
        for values in found:
            row = dict(zip(names, values, strict=True))
            try:
                record = of(row)
            except (ValueError, TypeError) as error:
                key = ", ".join(f"{c.name} {row[c.name]}" for c in table.primary_key.columns)
                raise HistoryError(f"{self.name}: {table.name} with {key}: {error}") from error
            yield record

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._failing(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except IntegrityError:
            # the record does not fit, which callers explain
            raise
        except SQLAlchemyError as error:
            raise DatabaseFailedError(f"history {self.name}: {_reason(error)}") from error

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        # opening a connection costs more than writing a trial
        if self._writer is None:
            with self._failing():
                self._writer = self._engine.connect()
        with self._writing_by(self._writer):
            yield self._writer

    @contextmanager
    def _writing_by(self, connection: Connection) -> Iterator[None]:
        with self._failing(), connection.begin():
            if self._engine.dialect.name == "sqlite":
                # from the start: a reader that begins to write may have to give up
                connection.execute(text("BEGIN IMMEDIATE"))
            yield


def _reason(error: SQLAlchemyError) -> str:
    return str(error).partition("\n")[0]
