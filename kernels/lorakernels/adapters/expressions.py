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
# within one `limited_matching`: of all matches that take longer, and of all matches
_LIMIT_S = 1.0
_TOTAL_S = 10.0

_ESCAPED = re.compile(r"\\.", re.DOTALL)
# `regex` reads these otherwise than `re` does: fuzzy counts, and classes such as [:alpha:]
_OF_REGEX_ONLY = re.compile(r"\{(?!\d+(?:,\d*)?\}|,\d+\})|\[:")


@dataclass(slots=True)
class _Budget:
    """Seconds that are left: for slow matches, and for all of them together."""

    slow: float = _LIMIT_S
    total: float = _TOTAL_S

    @property
    def left(self) -> float:
        return min(self.slow, self.total)

    def spend(self, seconds: float) -> None:
        self.total -= seconds
        self.slow -= seconds if seconds > _ORDINARY_S else 0.0


_budget: ContextVar[_Budget | None] = ContextVar("time left for matches", default=None)


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
        budget = _budget.get() or _Budget()
        begin = time.perf_counter()
        try:
            if budget.total <= 0:
                raise TimeoutError
            return getattr(_compiled(self.used_as), how)(
                name, timeout=max(budget.left, _ORDINARY_S)
            )
        except TimeoutError as late:
            which = f"the expression {printable(repr(self.text))}"
            takes = f"{which} takes more than {_LIMIT_S:g} s"
            if budget.total <= 0:
                takes = f"{which} and the others of this adapter take more than {_TOTAL_S:g} s"
            raise AdapterError(
                f"{self.place}: {takes} to match {printable(name)}; allowed is one that matches "
                "names of modules at once, without repetitions inside of repetitions"
            ) from late
        finally:
            budget.spend(time.perf_counter() - begin)


@contextmanager
def limited_matching() -> Iterator[None]:
    """Within, matches have one limit for all of them together, not one for each."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


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
