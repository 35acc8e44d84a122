"""Whose error it is: what escapes from a subject is marked where its code is called.

Invariant: an error is the subject's because it left `subject_code`, never because of what it looks
like or which files are in its traceback. Everything else that an oracle raises is the harness's.
"""

from __future__ import annotations

from types import TracebackType

_MARK = "_loragate_raised_by_subject"
# the last error that left a subject
_LAST: list[BaseException] = []


class BrokenProtocol(Exception):
    """A subject raised nothing, but did not keep the protocol. The message is one line: what was
    called, what came back, what is expected."""


class _SubjectCode:
    # a class, because contextlib assigns to exceptions, and a frozen dataclass of a subject's
    # refuses that
    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            BaseException.__setattr__(error, _MARK, True)
            _LAST[:] = [error]


def subject_code() -> _SubjectCode:
    """Within, the subject runs, directly or as part of a capture or a wait for the device. Errors
    leave it as they are, with a mark."""
    return _SubjectCode()


def raised_by_subject(error: BaseException) -> bool:
    return bool(getattr(error, _MARK, False))


def forget_errors() -> None:
    """No error has left a subject yet."""
    _LAST.clear()


def original_of(error: BaseException) -> BaseException:
    """The error of the subject that became a SystemError on its way.

    Where memory of a GPU is freed while an exception is raised, the callbacks with which torch
    reports that (torch/csrc/PyInterpreter.cpp, torch 2.11) drop the exception, and CPython raises
    a SystemError instead.
    """
    return _LAST[0] if was_dropped(error) and _LAST else error


def was_dropped(error: BaseException) -> bool:
    """Whether this is the SystemError in place of an exception that was dropped. What it was is
    known of a subject's alone, by `original_of`."""
    return isinstance(error, SystemError) and "exception" in str(error)
