"""MoE layers of vLLM with the plug-in's methods: w13 and w2 of two- and three-dimensional models,
shared factors, and slices in the other order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from loragate.core.machine import select_interpreter

select_interpreter()


from lorakernels.integrations.vllm.launches import launch_counts  # noqa: E402
from lorakernels.runtime import tuning  # noqa: E402

MIXED = (0, -1, 2, 1, 2)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("slices", [1, 2])
def test_each_pair_gets_the_adapter_of_its_token_and_expert(
    server: Any, mixin: Any, make_experts: Any, slices: int, shared: bool
) -> None:
    experts = make_experts(server, mixin, slices, shared=shared)
    server.step(MIXED)
    experts.apply(MIXED)
    assert launch_counts()["experts"].launched == 2


def test_a_delta_in_two_kernels_has_memory_between_them(
    monkeypatch: pytest.MonkeyPatch, plain: Any, mixin: Any, make_experts: Any
) -> None:
    # no batch is small enough for one kernel
    moe = replace(tuning.DEFAULT.moe, small_reads=0)
    monkeypatch.setattr(tuning, "DEFAULT", replace(tuning.DEFAULT, moe=moe))
    experts = make_experts(plain, mixin)
    plain.step(MIXED)
    experts.apply(MIXED)


@pytest.mark.parametrize("adds", [True, False])
def test_slices_in_the_other_order_are_written_in_that_order(
    plain: Any, mixin: Any, make_experts: Any, adds: bool
) -> None:
    experts = make_experts(plain, mixin)
    plain.step(MIXED)
    experts.apply(MIXED, swaps=True, adds=adds)
    experts.apply(MIXED, swaps=False, adds=adds)


def test_a_padded_step_and_one_of_base_rows_follow_each_other(
    plain: Any, mixin: Any, make_experts: Any
) -> None:
    experts = make_experts(plain, mixin)
    for slots, rows in ((MIXED, 8), ((-1, -1), 4), ((1,), 1), ((-1, 0), 2)):
        plain.step(slots)
        experts.apply(slots, rows=rows)
    assert launch_counts()["experts"].left_out == 2


def test_layers_that_run_one_after_the_other_share_their_tables(
    plain: Any, mixin: Any, make_experts: Any
) -> None:
    first, second = make_experts(plain, mixin), make_experts(plain, mixin, 1)
    plain.step(MIXED)
    second.apply(MIXED)
    first.apply(MIXED)
    assert len(plain.wrapper._pairs) == 1


def test_ids_of_another_integer_type_are_taken(plain: Any, mixin: Any, make_experts: Any) -> None:
    experts = make_experts(plain, mixin)
    routes = experts.routes
    experts.routes = lambda rows: (routes(rows)[0].long(), routes(rows)[1])  # type: ignore[method-assign]
    plain.step(MIXED)
    experts.apply(MIXED)
