"""Launches that are noted and not made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.runtime.launching import noted_launches, start  # noqa: E402


def test_launches_after_an_error_within_a_list_are_made() -> None:
    made: list[str] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[[str], None]:
            return made.append

    with suppress(KeyError), noted_launches() as noted:
        start(Kernel(), (1,))("noted")
        raise KeyError
    start(Kernel(), (1,))("made")
    assert [launch.args for launch in noted] == [("noted",)]
    assert made == ["made"]


def test_launches_behind_an_inner_list_are_noted_in_the_outer_one() -> None:
    kernel = object()
    with noted_launches() as outer:
        start(kernel, (1,))("first")
        with noted_launches() as inner:
            start(kernel, (1,))("second")
        start(kernel, (1,))("third")
    assert [launch.args for launch in outer] == [("first",), ("third",)]
    assert [launch.args for launch in inner] == [("second",)]
