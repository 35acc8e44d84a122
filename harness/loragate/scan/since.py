"""The cases that a change of the source may have changed. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from loragate.history import History


def cases_changed(cases: Iterable[str], history: History, files: Collection[str]) -> frozenset[str]:
    """The cases whose path, when it was last traced, ran one of `files`, which are relative to the
    root of the project; and those that were never traced."""
    sources = {path.path_key: frozenset(path.files) for path in history.paths()}
    last = history.last_path_keys()
    return frozenset(
        case
        for case in cases
        if case not in last or not sources.get(last[case], frozenset(files)).isdisjoint(files)
    )
