"""Where the harness keeps what later processes need again, in the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(kind: str) -> Path | None:
    """The folder of a kind of entries, which may not exist yet. By the rules of XDG, which ignore
    a relative path; None where there is no home."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        root = given if given.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "loragate" / kind
