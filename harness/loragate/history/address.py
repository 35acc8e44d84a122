"""Where a history is: a file of SQLite, or a URL of SQLAlchemy. What cannot be one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError

from loragate.history.model import HistoryError

# how long a writer waits for another one
_PATIENCE_S = 60
_BACKENDS = ("postgresql", "sqlite")
# the driver that the package asks for
_EXAMPLE = "postgresql+psycopg://user@host/name"
_INSTALL = "pip install loragate[postgresql]"


def engine_of(where: str | Path) -> Engine:
    """The engine of a file or URL, which has not connected yet. Raises HistoryError."""
    url = _url(where)
    name = url.render_as_string(hide_password=True)
    backend = url.get_backend_name()
    if backend not in _BACKENDS:
        known = ", ".join(_BACKENDS)
        raise HistoryError(f"history {name}: {backend!r} is not one of {known}")
    if backend == "sqlite" and url.database in (None, "", ":memory:"):
        raise HistoryError(f"history {name}: names no file, as sqlite:///history.db does")
    engine = _engine(url, name)
    if backend == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
    return engine


def _engine(url: URL, name: str) -> Engine:
    try:
        return create_engine(url)
    except ModuleNotFoundError as error:
        text = f"needs the package {error.name}; with {_EXAMPLE} it is {_INSTALL}"
        raise HistoryError(f"history {name}: {text}") from error
    except ArgumentError as error:
        text = f"there is no driver {url.drivername!r}; use one as in {_EXAMPLE}"
        raise HistoryError(f"history {name}: {text}") from error


def file_of(where: str | Path) -> Path | None:
    """The file of a history in SQLite; None for another one. Raises HistoryError."""
    if not _is_url(where):
        return Path(where)
    url = _url(where)
    is_file = url.get_backend_name() == "sqlite" and url.database
    return Path(url.database) if is_file and url.database else None


def _is_url(where: str | Path) -> bool:
    return isinstance(where, str) and "://" in where


def _url(where: str | Path) -> URL:
    if not _is_url(where):
        return URL.create("sqlite", database=_usable(where))
    try:
        return make_url(str(where))
    except (ArgumentError, ValueError) as error:
        # SQLAlchemy repeats what it was given, which may hold a password
        text = f"the URL of a history must be like {_EXAMPLE}, with a number as its port, if any"
        raise HistoryError(text) from error


def _usable(where: str | Path) -> str:
    path = Path(where)
    # '' is the current folder
    if path.exists() and not path.is_file():
        raise HistoryError(f"history {str(where)!r}: must be a file or a URL")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HistoryError(f"history {path}: {error.strerror}") from error
    return str(path)


def _prepare_sqlite(connection: Any, record: object) -> None:
    # transactions begin where this module says so, see `History._writing`
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_PATIENCE_S * 1000}")
    cursor.execute("PRAGMA journal_mode = WAL")
    # a killed process loses nothing; only a machine without power may lose its last moments
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()
