"""`loragate history`: move what scans have seen between files, machines and databases."""

from __future__ import annotations

import argparse
import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loragate.core.arguments import count_from, path_of
from loragate.core.errors import CommandError, usage_errors
from loragate.core.files import write_atomically
from loragate.core.output import say
from loragate.core.plural import counted
from loragate.core.verdict import ExitCode
from loragate.history import DatabaseFailedError, History, HistoryError, open_history
from loragate.history.address import file_of
from loragate.history.lines import check_lines, export_lines, import_lines

_DEFAULT = "history.db"
_DAY_S = 86400
_MOST_DAYS = 36500
# how a file of SQLite begins
_SQLITE = b"SQLite format 3\0"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("history", help="merge, export and prune what scans have seen")
    add_history_option(parser)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    merge = actions.add_parser("merge", help="add other histories; what is known stays")
    merge.add_argument("others", nargs="+", metavar="HISTORY", help="a file or a URL")
    merge.set_defaults(act=_merge)
    given = actions.add_parser("import", help="add files of lines of JSON")
    given.add_argument("files", nargs="+", type=path_of, metavar="FILE")
    given.set_defaults(act=_import)
    export = actions.add_parser("export", help="write all records as lines of JSON")
    export.add_argument("file", type=path_of, metavar="FILE")
    export.set_defaults(act=_export)
    prune = actions.add_parser("prune", help="remove old trials that were right")
    prune.add_argument("--days", type=count_from(1, _MOST_DAYS), required=True, metavar="N")
    prune.set_defaults(act=_prune)
    parser.set_defaults(run=run)


def add_history_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--history",
        default=_DEFAULT,
        metavar="FILE|URL",
        help="a SQLite file, or a URL as postgresql+psycopg://host/name (default: history.db)",
    )


@contextmanager
def open_named(where: str, *, is_made: bool) -> Iterator[History]:
    """is_made: whether a file that does not exist is made. Raises CommandError, also for what goes
    wrong with the history within."""
    try:
        if not is_made:
            _refuse_missing(where)
        with open_history(where) as history:
            yield history
    except HistoryError as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
    except DatabaseFailedError as error:
        raise CommandError(str(error), ExitCode.INFRASTRUCTURE) from error


def _refuse_missing(where: str) -> None:
    # an empty history in place of a name with a mistake would look like nights that found nothing
    path = file_of(where)
    if path is None:
        return
    if not path.is_file():
        raise HistoryError(f"there is no history {where!r}")
    if not path.stat().st_size:
        # a copy that was cut
        raise HistoryError(f"history {where!r}: the file is empty")


def run(arguments: argparse.Namespace) -> ExitCode:
    is_made = arguments.act in (_merge, _import)
    with usage_errors():
        # before a history is made that would hold nothing
        for name in getattr(arguments, "others", ()):
            _refuse_missing(name)
    if arguments.act is _import:
        _check_files(arguments)
    if arguments.act is _merge:
        _check_others(arguments)
    with open_named(arguments.history, is_made=is_made) as history:
        arguments.act(arguments, history)
    return ExitCode.OK


def _check_others(arguments: argparse.Namespace) -> None:
    """Before a history is made for them. Raises CommandError."""
    path = file_of(arguments.history)
    if path is None or path.exists():
        return
    for name in arguments.others:
        with open_named(name, is_made=False) as other:
            other.check()


def _merge(arguments: argparse.Namespace, history: History) -> None:
    for name in arguments.others:
        with open_history(name) as other:
            say(f"{name}: {counted(history.merge(other), 'new trial')}")


def _check_files(arguments: argparse.Namespace) -> None:
    """Before a history is made for them. Raises CommandError."""
    path = file_of(arguments.history)
    if path is None or path.exists():
        return
    known: set[str] = set()
    for given in arguments.files:
        try:
            with _naming(given):
                _refuse_pipe(given)
                check_lines(given, known)
        except HistoryError as error:
            raise CommandError(str(error), ExitCode.USAGE) from error


def _refuse_pipe(path: Path) -> None:
    if path.exists() and not path.is_file():
        # a pipe or a device may have no end
        raise OSError(errno.EINVAL, "must be a regular file")


def _import(arguments: argparse.Namespace, history: History) -> None:
    for path in arguments.files:
        with _naming(path):
            _refuse_pipe(path)
            say(f"{path}: {counted(import_lines(history, path), 'new trial')}")


def _export(arguments: argparse.Namespace, history: History) -> None:
    path: Path = arguments.file
    with _naming(path):
        if _is_database(path):
            raise OSError(errno.EEXIST, "is a database; name another file")
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        write_atomically(path, "".join(f"{line}\n" for line in export_lines(history)))


def _is_database(path: Path) -> bool:
    """Whether an export would take the place of a history, perhaps of this one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What the system says about a file becomes a CommandError."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}", ExitCode.USAGE) from error


def _prune(arguments: argparse.Namespace, history: History) -> None:
    removed = history.prune(before=time.time() - arguments.days * _DAY_S)
    say(f"{counted(removed, 'trial')} removed")
