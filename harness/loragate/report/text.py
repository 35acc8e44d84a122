"""Text of a run as a report may show it: what it contains is seen and never acts. Pure.

Names, messages and output come from the code under test. A control character among them could move
the cursor of a terminal, one of Unicode's invisible ones could show a name as another, and a line
could be a command to the CI system that reads the log.
"""

from __future__ import annotations

import re

# colours, as compilers and pytest put them into their messages; other sequences are shown
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")

_UNUSUAL = re.compile(r"[^ -~]")
_UNUSUAL_IN_LINES = re.compile(r"[^ -~\n\t]")
# GitHub executes `::command::` at the start of a line, whatever blanks precede it, and
# `##[command]` anywhere in a line; Azure Pipelines does so with `##vso[command]`
_COMMAND = re.compile(r"^([^\S\n]*)(?=::)|(?<=##)(?=\w*\[)", re.MULTILINE)


def one_line(text: str) -> str:
    """A name or another short text on one line, with an escape for whatever cannot be seen."""
    return _UNUSUAL.sub(_visible, text)


def printable(text: str) -> str:
    """A text of several lines: line ends and tabs stay, colours are left out, and whatever else
    cannot be seen becomes an escape."""
    return _UNUSUAL_IN_LINES.sub(_visible, _COLOUR.sub("", text).replace("\r\n", "\n"))


def headline(text: str) -> str:
    """The first line that is not empty; the rest of a message is usually a stack."""
    lines = (line.strip() for line in printable(text).split("\n"))
    return one_line(next((line for line in lines if line), ""))


def without_commands(text: str) -> str:
    """Output for a log in which no line is a command to a CI system."""
    return _COMMAND.sub(r"\1\\", text)


def shortened(text: str, limit: int) -> str:
    """One line of at most `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _visible(found: re.Match[str]) -> str:
    character = found[0]
    if character.isprintable():
        return character
    # "\x1b", "\n", "\u202e", "\udc80"
    return character.encode("unicode_escape").decode()
