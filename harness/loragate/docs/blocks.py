"""Generated parts of a Markdown page: the text between `<!-- name: begin -->` and
`<!-- name: end -->`. Pure."""

from __future__ import annotations


class BlockError(ValueError):
    """A page whose markers are missing or out of order; names the page and the block."""


def content_of(text: str, name: str, *, page: str) -> str:
    """The text between the markers, without the line breaks next to them. Raises BlockError."""
    start, end = _bounds(text, name, page)
    return text[start:end].strip("\n")


def replaced(text: str, name: str, content: str, *, page: str) -> str:
    """The page with `content` between the markers of one block. Raises BlockError."""
    start, end = _bounds(text, name, page)
    return f"{text[:start]}\n{content}\n{text[end:]}"


def _bounds(text: str, name: str, page: str) -> tuple[int, int]:
    begin_marker, end_marker = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    for marker in (begin_marker, end_marker):
        if text.count(marker) != 1:
            raise BlockError(f"{page}: must hold {marker} once (got {text.count(marker)})")
    start, end = text.index(begin_marker) + len(begin_marker), text.index(end_marker)
    if end < start:
        raise BlockError(f"{page}: {end_marker} comes before {begin_marker}")
    return start, end
