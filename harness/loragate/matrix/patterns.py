"""Patterns that select cases by their ids, the same for every command. Pure.

A pattern with a wildcard (`*`, `?` or `[`) is a shell pattern for the whole id. Any other pattern
is split at its dots, and selects the ids that hold its pieces in this order, each within one piece
of the id: `dense_delta.tokens-6` selects `torch.dense_delta.dtype-bf16.tokens-6`. A number never
matches a part of a number: neither `tokens-64` nor `tokens-16` is selected by `tokens-6`.
A full id selects that case alone, also where other ids hold all of its pieces. An empty pattern, as
of a variable of a shell that is not set, selects nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import cache

from loragate.matrix.case_run import split_draw

WILDCARDS = "*?["
_NEAREST_SHOWN = 3
_NEAREST_CUTOFF = 0.6


class SelectionError(ValueError):
    """A pattern selects nothing: most likely a typing error, and never an empty success."""


def selected_ids(
    patterns: Sequence[str],
    ids: Collection[str],
    *,
    beyond: Mapping[str, str] | None = None,
) -> frozenset[str]:
    """Those of `ids` that one of the patterns selects; all of them if there are no patterns.

    beyond: ids of cases that are not part of the run, with the tier that each belongs to.
    Raises SelectionError if a pattern selects nothing.
    """
    if not patterns:
        return frozenset(ids)
    known = frozenset(ids)
    others = beyond or {}
    found: set[str] = set()
    for pattern in patterns:
        chosen = _chosen(pattern, known, others)
        if not chosen:
            raise SelectionError(_nothing(pattern, known, others))
        found |= chosen
    return frozenset(found)


def is_selected(name: str, patterns: Sequence[str]) -> bool:
    """True if a single name matches one of the patterns, or if there are none."""
    return not patterns or any(_matches(name, pattern) for pattern in patterns)


def _chosen(pattern: str, ids: frozenset[str], others: Mapping[str, str]) -> set[str]:
    if pattern in ids:
        return {pattern}
    # the id of a case that this run leaves out stands for no other case
    return set() if pattern in others else {name for name in ids if _matches(name, pattern)}


def _matches(name: str, pattern: str) -> bool:
    if any(sign in pattern for sign in WILDCARDS):
        return fnmatchcase(name, pattern)
    if not pattern:
        return False
    pieces = iter(name.split("."))
    # `any` takes pieces up to the one that matches, so that the next search goes on behind it
    return all(any(_holds(piece, wanted) for piece in pieces) for wanted in _pieces(pattern))


def _pieces(pattern: str) -> list[str]:
    """A dot at either end of a pattern, as one copies it out of an id, means nothing."""
    return [piece for piece in pattern.split(".") if piece]


@cache
def _holds(piece: str, wanted: str) -> bool:
    before = r"(?<!\d)" if wanted[:1].isdigit() else ""
    after = r"(?!\d)" if wanted[-1:].isdigit() else ""
    return re.search(f"{before}{re.escape(wanted)}{after}", piece) is not None


def _nothing(pattern: str, ids: frozenset[str], others: Mapping[str, str]) -> str:
    """Why a pattern selects nothing, and what was meant instead."""
    text, draw, repeat = split_draw(pattern)
    if draw is not None and any(_matches(name, text) for name in (*ids, *others)):
        repeats = f" --repeats {repeat + 1}" if repeat else ""
        return (
            f"{pattern!r} names draw {draw} of a case, and a pattern selects cases: leave out "
            f"{pattern.removeprefix(text)!r} and add --draw {draw}{repeats} "
            "(pytest has the same options as --loragate-draw and --loragate-repeats)"
        )
    tiers = sorted({tier for name, tier in others.items() if _matches(name, pattern)})
    elsewhere = f", but some of tier {' and '.join(tiers)}" if tiers else ""
    ordered = None if tiers else _in_order(pattern, ids)
    near = [] if tiers else nearest_ids(pattern, ids)
    order = f"\n  in the order of an id: {ordered}" if ordered else ""
    hint = order + "".join(f"\n  nearest: {name}" for name in near)
    return f"{pattern!r} selects none of {len(ids)} cases{elsewhere}{hint}"


def _in_order(pattern: str, ids: Collection[str]) -> str | None:
    """The pieces of a pattern in an order that selects something; None where there is none."""
    wanted = _pieces(pattern)
    for name in sorted(ids):
        pieces = name.split(".")
        places = [[i for i, piece in enumerate(pieces) if _holds(piece, one)] for one in wanted]
        if all(places):
            ordered = ".".join(one for _, one in sorted(zip(places, wanted, strict=True)))
            if _matches(name, ordered):
                return ordered
    return None


def nearest_ids(pattern: str, ids: Collection[str]) -> list[str]:
    """The ids that were most likely meant, the best first.

    Pieces are compared one by one: a pattern of two pieces resembles no id of twelve as a whole.
    """
    wanted = _pieces(re.sub(r"[*?\[\]]+", ".", pattern))
    if not wanted:
        return []
    likeness = {name: _likeness(wanted, name.split(".")) for name in ids}
    near = [name for name, value in likeness.items() if value >= _NEAREST_CUTOFF]
    # of equally near ids the one with the fewest pieces that were not asked for
    near.sort(key=lambda name: (-likeness[name], len(name), name))
    return near[:_NEAREST_SHOWN]


def _likeness(wanted: Sequence[str], pieces: Sequence[str]) -> float:
    """Between 0 and 1: how well each wanted piece is met by the piece that meets it best."""
    return sum(max(_alike(one, piece) for piece in pieces) for one in wanted) / len(wanted)


@cache
def _alike(wanted: str, piece: str) -> float:
    if _holds(piece, wanted):
        return 1.0
    return SequenceMatcher(None, wanted, piece, autojunk=False).ratio()
