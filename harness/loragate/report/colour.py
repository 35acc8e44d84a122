"""Colours of the terminal. They add nothing that the text does not say.

Pure, except that `colour_for` asks whether its stream is a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TextIO

from loragate.core.verdict import Verdict

RED, GREEN, YELLOW, MAGENTA, CYAN, DIM, BOLD = "31", "32", "33", "35", "36", "2", "1"
VERDICT_COLOURS: Mapping[Verdict, str] = {
    Verdict.PASS: GREEN,
    Verdict.FAIL: RED,
    Verdict.INCONCLUSIVE: YELLOW,
    Verdict.SKIP: DIM,
    Verdict.INFRA: MAGENTA,
}


class Colour(StrEnum):
    ON = "on"
    OFF = "off"


def colour_for(stream: TextIO, environ: Mapping[str, str]) -> Colour:
    """Colour for a terminal, unless NO_COLOR holds anything (no-color.org) or TERM is dumb."""
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb" or not stream.isatty():
        return Colour.OFF
    return Colour.ON


def paint(text: str, code: str, colour: Colour) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour is Colour.ON and text else text


def verdict_name(verdict: Verdict, colour: Colour, *, width: int = 0) -> str:
    """The verdict in capitals, padded to `width` columns."""
    name = verdict.upper()
    return paint(name, f"{BOLD};{VERDICT_COLOURS[verdict]}", colour) + " " * (width - len(name))
