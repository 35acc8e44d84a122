"""Names of files in errors: in one line, and no longer than it takes to tell them apart."""

from __future__ import annotations

import pytest

from lorakernels.adapters.errors import printable


@pytest.mark.parametrize("length", [1, 159, 160])
def test_a_name_of_up_to_160_characters_is_shown_whole(length: int) -> None:
    assert printable("n" * length) == "n" * length


@pytest.mark.parametrize("hidden", [1, 2, 300])
def test_of_a_longer_name_both_ends_are_shown_and_the_rest_is_counted(hidden: int) -> None:
    name = "a" * 80 + "b" * hidden + "c" * 80
    assert printable(name) == f"{'a' * 80}... {hidden} more characters ...{'c' * 80}"


def test_what_cannot_be_seen_counts_as_it_is_shown() -> None:
    assert printable("\x1b[31m") == "\\x1b[31m"
    assert "more characters" in printable("\x00" * 41)
