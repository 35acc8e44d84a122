"""Calls with fewer rows than are mapped, such as those of a layer that gets a part of a batch: the
rows are the first ones, and what is behind them in memory is neither read nor written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.integrations.vllm import launches  # noqa: E402

MIXED = (0, -1, 2, 2, -1, 1, 0)


@pytest.fixture
def linear(server: Any, make_linear: Any) -> Any:
    made = make_linear(server)
    for slot in range(3):
        made.load(slot, seed=10 * slot)
    return made


def check_first(linear: Any, slots: tuple[int, ...], rows: int) -> None:
    """The layer adds the deltas of the first rows of a buffer that goes on behind them."""
    layer, generator = linear.layer, torch.Generator().manual_seed(7)
    x = torch.randn(len(slots), layer.k, generator=generator)
    out = torch.zeros(len(slots), sum(layer.output_slices))
    wanted = linear.wanted(x, slots) - x @ layer.weight.T
    wanted[rows:] = 0
    x[rows:] = torch.nan
    layer.punica_wrapper.add_lora_linear(
        *(out[:rows], x[:rows], layer.lora_a_stacked, layer.lora_b_stacked),
        *(1.0, layer.output_slices),
    )
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_a_layer_may_get_the_first_rows_of_a_batch(server: Any, linear: Any, rows: int) -> None:
    server.step(MIXED)
    check_first(linear, MIXED, rows)
    assert launches.launch_counts()["linear"].launched == 1


def test_the_tiles_of_the_first_rows_have_the_height_of_these(
    make_server: Callable[..., Any], make_linear: Any
) -> None:
    server = make_server(rows=2100)
    linear = make_linear(server, (5,))
    for slot in range(3):
        linear.load(slot, seed=10 * slot)
    slots = (1, -1, 0, 2, 1) * 408
    server.step(slots)
    for rows in (2039, 1030, 136, 7):
        check_first(linear, slots, rows)


def test_a_call_with_all_rows_follows_one_with_fewer(server: Any, linear: Any) -> None:
    server.step(MIXED)
    check_first(linear, MIXED, 2)
    linear.check(MIXED)
    linear.check(MIXED, rows=12)


def test_the_first_rows_of_each_step_have_the_adapters_of_that_step(
    server: Any, linear: Any
) -> None:
    # the tables of a mapping are written in place
    for slots in (MIXED, MIXED[::-1], MIXED):
        server.step(slots)
        check_first(linear, slots, 4)


def test_the_first_rows_may_lack_adapters_that_others_have(server: Any, linear: Any) -> None:
    server.step((-1, -1, 2, 1))
    check_first(linear, (-1, -1, 2, 1), 2)


@pytest.mark.parametrize("rows", [len(MIXED), 12])
def test_rows_that_are_all_mapped_or_padded_have_the_tables_of_their_step(
    server: Any, linear: Any, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    server.step(MIXED)
    # making tables anew takes a launch in every layer
    monkeypatch.delattr("lorakernels.integrations.vllm.linear.tables_of_first_rows")
    linear.check(MIXED, rows=rows)


def test_no_rows_at_all_are_taken(server: Any, linear: Any) -> None:
    server.step(MIXED)
    check_first(linear, MIXED, 0)


@pytest.mark.parametrize("rows", [1, 4])
def test_experts_may_get_the_first_rows_of_a_batch(
    server: Any, mixin: Any, make_experts: Any, rows: int
) -> None:
    experts = make_experts(server, mixin)
    server.step(MIXED)
    experts.apply(MIXED, rows=rows)
