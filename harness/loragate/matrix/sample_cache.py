"""Samples that earlier processes computed, in the user's cache folder.

A sample is kept under a hash of all that it follows from: what is asked for, the release of
covertable and the text of the module that asks it. So an entry is never out of date, and processes
that write one at the same time write the same. A file holds the hash of its points as well: one
that has lost some of them would have fewer cases, which nobody would miss. A folder that cannot be
read or written costs time and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

from loragate.core.files import read_regular, write_atomically
from loragate.core.user_cache import user_cache

Points = tuple[tuple[int, ...], ...]


def kept(
    sizes: Sequence[int], asked: object, source: Path, compute: Callable[[], Points]
) -> Points:
    """What `compute` gives, or what it gave an earlier process.

    sizes: the numbers of values of the axes. asked: all that `compute` follows from, with a `repr`
    that is the same in every process. source: the module that it is in.
    """
    folder = user_cache("samples")
    if folder is None:
        return compute()
    parts = (tuple(sizes), asked, version("covertable"), _content(source))
    path = folder / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.json"
    found = _read(path)
    if found is None:
        found = compute()
        _write(path, found)
    return found


@cache
def _content(source: Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()


def _read(path: Path) -> Points | None:
    """The points of a file; None where there is none, or one that is not as it was written."""
    try:
        text = read_regular(path).decode()
    except (OSError, ValueError):
        return None
    digest, _, points = text.partition("\n")
    if digest != _digest(path, points):
        return None
    return tuple(map(tuple, json.loads(points)))


def _digest(path: Path, points: str) -> str:
    """Of the points of one file: those of another product would do for its axes, too."""
    return hashlib.sha256(f"{path.name}\n{points}".encode()).hexdigest()


def _write(path: Path, points: Points) -> None:
    text = json.dumps(points)
    try:
        write_atomically(path, f"{_digest(path, text)}\n{text}")
    except OSError:
        # a home that is read-only or full: the next process computes again
        return
