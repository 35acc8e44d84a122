"""JSON that others have written: files, which may be damaged, and lines of processes."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """As json.loads: json.JSONDecodeError for what is not JSON, and another ValueError for what is
    no text in UTF-8 or is nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
