"""JSON that others have written: files, which may be damaged, and lines of processes."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def parse_json(text: str | bytes, *, allow_nan: bool = True) -> Any:
    """As json.loads: json.JSONDecodeError for what is not JSON, and another ValueError for what is
    no text in UTF-8 or is nested too deeply for Python. allow_nan: whether NaN and Infinity are
    taken, which JSON does not have."""
    try:
        return json.loads(text, parse_constant=None if allow_nan else _refuse)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
