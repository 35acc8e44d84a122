"""Launches that are noted and not made."""

from __future__ import annotations

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.runtime.launching import noted_launches, start  # noqa: E402


def test_launches_behind_an_inner_list_are_noted_in_the_outer_one() -> None:
    kernel = object()
    with noted_launches() as outer:
        start(kernel, (1,))("first")
        with noted_launches() as inner:
            start(kernel, (1,))("second")
        start(kernel, (1,))("third")
    assert [launch.args for launch in outer] == [("first",), ("third",)]
    assert [launch.args for launch in inner] == [("second",)]
