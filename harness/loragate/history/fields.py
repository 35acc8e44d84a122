"""What the fields of a record may hold, for records that come from elsewhere. Pure.

Invariant: what passes here can be written to each database, and shown on each page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from loragate.history.model import LATEST_S, Outcome, PathFiles, Purpose, ScanRun, TrialRecord
from loragate.matrix.problems import nearest

Record = ScanRun | PathFiles | TrialRecord

# PostgreSQL has integers of 32 bits and names of 64 letters
_MOST = 2**31 - 1
_LONGEST = 64


def checked(kind: type[Record], given: object) -> dict[str, Any]:
    """The fields of a record of this kind. Raises ValueError, which names the field, what it may
    hold, and what was given."""
    if not isinstance(given, Mapping):
        raise ValueError(f"must be an object with fields (got {_short(given)})")
    known = {field.name: field for field in fields(kind)}
    for name in given:
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near}?" if near else ""
            raise ValueError(f"there is no field {name!r}{hint}")
    needed = [
        name
        for name, field in known.items()
        if field.default is MISSING and field.default_factory is MISSING
    ]
    missing = [name for name in needed if name not in given]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    for name, value in given.items():
        allowed, accepts = _ALLOWED.get(name, _TEXT)
        if not accepts(value):
            raise ValueError(f"{name} must be {allowed} (got {_short(value)}){_near(name, value)}")
    return dict(given)


def _near(name: str, value: object) -> str:
    near = nearest(value, _CHOICES[name]) if name in _CHOICES else None
    return f"; did you mean {near}?" if near else ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_text(value: object) -> bool:
    # what UTF-8 cannot encode, and the zero that PostgreSQL refuses
    return isinstance(value, str) and not any(c == "\0" or "\ud800" <= c < "\ue000" for c in value)


def _is_name(value: object) -> bool:
    return _is_text(value) and 0 < len(str(value)) <= _LONGEST


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and _is_number(value) and 0 <= value <= LATEST_S


def _is_mapping(value: object, accepts: Callable[[object], bool]) -> bool:
    return isinstance(value, Mapping) and all(
        _is_text(key) and accepts(item) for key, item in value.items()
    )


def _one_of(choices: type[StrEnum]) -> tuple[str, Callable[[object], bool]]:
    values = [choice.value for choice in choices]
    return f"one of {', '.join(values)}", values.__contains__


_TEXT = ("a text", _is_text)
_NAME = (f"a text of 1 to {_LONGEST} letters", _is_name)
_COUNT = (f"a whole number from 0 to {_MOST}", _is_count)
_TIME = ("seconds since 1970, up to the year 9999", _is_time)
_SECONDS = ("a number of seconds", lambda value: _is_number(value) and value >= 0)
_TEXTS = ("an object with texts", lambda value: _is_mapping(value, _is_text))
_ALLOWED: Mapping[str, tuple[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        "uid": _NAME,
        "run": _NAME,
        "path_key": (
            f"a text of at most {_LONGEST} letters",
            lambda value: value == "" or _is_name(value),
        ),
        "started_at": _TIME,
        "at": _TIME,
        "finished_at": (f"{_TIME[0]}, or null", lambda value: value is None or _is_time(value)),
        "budget_s": _SECONDS,
        "duration_s": _SECONDS,
        **dict.fromkeys(("number", "draw", "process", "place"), _COUNT),
        "purpose": _one_of(Purpose),
        "outcome": _one_of(Outcome),
        "promised": ("true or false", lambda value: type(value) is bool),
        "environment": _TEXTS,
        "conditions": _TEXTS,
        "health": ("an object with numbers", lambda value: _is_mapping(value, _is_number)),
        "files": (
            "a list of texts",
            lambda value: isinstance(value, list) and all(map(_is_text, value)),
        ),
    }
)
_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"purpose": tuple(Purpose), "outcome": tuple(Outcome)}
)
