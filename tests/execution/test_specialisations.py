"""What a kernel would be compiled for, by the launches that the interpreter is asked for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch

from loragate.core.machine import interpreter_is_on, select_interpreter

select_interpreter()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from loragate.execution.specialisations import HostLaunch, noted_launches  # noqa: E402

pytestmark = pytest.mark.skipif(not interpreter_is_on(), reason="needs Triton's interpreter")


def store(out_ptr, number):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, number)


def kernels_needed(arguments: list[tuple[Any, Any]], **declared: list[str]) -> list[set[int]]:
    """The places of launches that one compiled kernel does, with what a kernel declares."""
    launches: list[HostLaunch] = []
    kernel = triton.jit(store, **declared)
    with noted_launches(launches.append, lambda launch: None):
        for out, number in arguments:
            kernel[(1,)](out, number)
    found: dict[Hashable, set[int]] = {}
    for place, launch in enumerate(launches):
        found.setdefault(frozenset(launch.compiled_for.items()), set()).add(place)
    return list(found.values())


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({}, [{1}, {2, 17, -3}, {0, 16, 48, -16}, {1 << 31, 1 << 40}, {(1 << 31) + 1}]),
        (
            {"do_not_specialize_on_alignment": ["number"]},
            [{1}, {2, 17, -3, 0, 16, 48, -16}, {1 << 31, 1 << 40, (1 << 31) + 1}],
        ),
        (
            {"do_not_specialize": ["number"]},
            [{1, 2, 17, -3, 0, 16, 48, -16}, {1 << 31, 1 << 40, (1 << 31) + 1}],
        ),
    ],
    ids=lambda one: next(iter(one), "nothing") if isinstance(one, dict) else "",
)
def test_integers_need_the_kernels_that_the_declaration_leaves(
    declared: dict[str, list[str]], expected: list[set[int]]
) -> None:
    out = torch.zeros(1, dtype=torch.int64)
    numbers = [number for together in expected for number in together]
    found = kernels_needed([(out, number) for number in numbers], **declared)
    assert [{numbers[place] for place in places} for places in found] == expected


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({}, [{0, 1}, {2}, {3}]),
        ({"do_not_specialize_on_alignment": ["out_ptr"]}, [{0, 1, 2}, {3}]),
        ({"do_not_specialize": ["out_ptr"]}, [{0, 1, 2}, {3}]),
    ],
    ids=lambda one: next(iter(one), "nothing") if isinstance(one, dict) else "",
)
def test_tensors_need_the_kernels_that_the_declaration_leaves(
    declared: dict[str, list[str]], expected: list[set[int]]
) -> None:
    room = torch.zeros(32)
    tensors = [room[4:], room[8:], room[1:], room.view(torch.int32)]
    assert kernels_needed([(tensor, 3) for tensor in tensors], **declared) == expected
