"""Launches that are noted in place of being made."""

from __future__ import annotations

import threading
from typing import Any

from lorakernels.runtime.launching import is_noting, noted_launches, start


class Kernel:
    """Of which the arguments of each launch are kept."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __getitem__(self, grid: object) -> Any:
        return self.made.append


def in_another_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_launches_of_another_thread_are_made_while_those_of_one_are_noted() -> None:
    kernel, others = Kernel(), []
    with noted_launches() as launches:
        start(kernel, (1,))(1)
        in_another_thread(lambda: (start(kernel, (1,))(2), others.append(is_noting())))
        start(kernel, (1,))(3)
    start(kernel, (1,))(4)
    assert [launch.args for launch in launches] == [(1,), (3,)]
    assert (kernel.made, others) == ([2, 4], [False])


def test_launches_are_noted_by_the_innermost_who_asked_for_them() -> None:
    kernel = Kernel()
    with noted_launches() as outer:
        with noted_launches() as inner:
            start(kernel, (1,))(1)
        start(kernel, (1,))(2)
    assert ([launch.args for launch in inner], [launch.args for launch in outer]) == (
        [(1,)],
        [(2,)],
    )
    assert not kernel.made
