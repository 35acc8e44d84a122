"""Regular expressions from adapter files: matched as PEFT matches them, and never for long.

An expression means what it means to `re`, which PEFT uses. It is matched by `regex`, which can give
up: a match that takes long, in a file that nobody has reviewed, would stop the whole server.
Invariant: no other module matches an expression of an adapter.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex

from lorakernels.adapters.errors import AdapterError, printable

MAX_LENGTH = 4096
# names are short: an ordinary match takes microseconds
_ORDINARY_S = 0.001
# of all matches that take longer, within one `limited_matching`
_LIMIT_S = 1.0

_ESCAPED = re.compile(r"\\.", re.DOTALL)
# `regex` reads these otherwise than `re` does: fuzzy counts, and classes such as [:alpha:]
_OF_REGEX_ONLY = re.compile(r"\{(?!\d+(?:,\d*)?\}|,\d+\})|\[:")
_left: ContextVar[list[float] | None] = ContextVar("time left for slow matches", default=None)


class ExpressionError(ValueError):
    """Says why a text is no expression that may be matched; `reason` names no position."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message


@dataclass(frozen=True, slots=True)
class Expression:
    """`text` as the file gives it, `used_as` the expression that is built around it; `place` is the
    file and the field."""

    text: str
    used_as: str
    place: str

    def match(self, name: str) -> Any:
        """Like `re.match`; None without a match. Raises AdapterError if it takes too long."""
        return self._timed("match", name)

    def fullmatch(self, name: str) -> Any:
        """Like `re.fullmatch`; None without a match. Raises AdapterError if it takes too long."""
        return self._timed("fullmatch", name)

    def _timed(self, how: str, name: str) -> Any:
        left = _left.get() or [_LIMIT_S]
        begin = time.perf_counter()
        try:
            return getattr(_compiled(self.used_as), how)(name, timeout=max(left[0], _ORDINARY_S))
        except TimeoutError as late:
            raise AdapterError(
                f"{self.place}: the expression {printable(repr(self.text))} takes more than "
                f"{_LIMIT_S:g} s to match {printable(name)}; allowed is one that matches names of "
                "modules at once, without repetitions inside of repetitions"
            ) from late
        finally:
            taken = time.perf_counter() - begin
            left[0] -= taken if taken > _ORDINARY_S else 0.0


@contextmanager
def limited_matching() -> Iterator[None]:
    """Within, slow matches have one limit for all of them together, not one for each."""
    token = _left.set([_LIMIT_S])
    try:
        yield
    finally:
        _left.reset(token)


def check_expression(text: str) -> None:
    """Raises ExpressionError unless `re` and `regex` both accept the text and agree about it."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"of at most {MAX_LENGTH} characters, not {len(text)}")
    if found := _OF_REGEX_ONLY.search(_ESCAPED.sub("", text)):
        raise ExpressionError(f"with {found.group(0)} written as \\{found.group(0)}")
    try:
        re.compile(text)
        regex.compile(text)
    except (re.error, regex.error) as bad:
        raise ExpressionError(str(bad), bad.msg) from bad
    # a repeat count or a nesting depth that the compiler of expressions cannot handle
    except (OverflowError, RecursionError) as bad:
        raise ExpressionError(str(bad)) from bad


def number_of_groups(text: str) -> int:
    """How many numbered groups a checked expression has."""
    return re.compile(text).groups


@lru_cache(maxsize=4096)
def _compiled(text: str) -> Any:
    return regex.compile(text)
