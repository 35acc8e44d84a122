"""MoE layers of vLLM with the plug-in's methods: w13 and w2 of two- and three-dimensional models,
shared factors, and slices in the other order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.integrations.vllm.adoption import adopt  # noqa: E402
from lorakernels.integrations.vllm.launches import launch_counts  # noqa: E402
from tests.integrations.plug_in.conftest import (  # noqa: E402
    EXPERTS,
    HIDDEN,
    INTER,
    TOP_K,
    Server,
    StandInExperts,
    StandInWrapper,
    named,
    randn,
)

MIXED = (0, -1, 2, 1, 2)


class Experts:
    """An adopted layer with random adapters, and what plain torch makes of it."""

    def __init__(self, server: Server, mixin: Any, slices: int = 2, *, shared: bool = False):
        kind = named("FusedMoEWithLoRA" if slices == 2 else "FusedMoE3DWithLoRA", StandInExperts)
        self.layer: Any = kind(slices, shared=shared)
        self.layer.set_mapping(adopt(self.layer, server.wrapper))
        self.mixin, self.server = mixin, server
        for number, stack in enumerate(self.layer.stacks):
            # in place, as vLLM loads
            for slot in range(len(stack)):
                stack[slot].copy_(randn(*stack[slot].shape, seed=10 * number + slot))

    def routes(self, rows: int) -> tuple[Tensor, Tensor]:
        ids = randn(rows, EXPERTS, seed=3).argsort(1)[:, :TOP_K].int().contiguous()
        return ids, randn(rows, TOP_K, seed=4).abs()

    def apply(
        self, slots: tuple[int, ...], *, rows: int | None = None, swaps: bool = False,
        adds: bool = True,
    ) -> None:
        """Both products, compared with a plain loop over pairs."""
        count = len(slots) if rows is None else rows
        ids, weights = self.routes(count)
        x, y = randn(count, HIDDEN, seed=5), torch.full((count, TOP_K, 2 * INTER), float(adds))
        act, z = randn(count * TOP_K, INTER, seed=6), torch.full((count, TOP_K, HIDDEN), float(adds))
        wanted_y, wanted_z = y.clone(), z.clone()
        context, shared = self.layer.context, {"w1": None, "w2": None, "num_tokens": count}
        shared |= {"topk_weights": weights, "top_k_num": TOP_K, "add_inputs": adds}
        state = self.mixin.apply_w13_lora(
            context, y=y, x=x, topk_ids=ids, expert_map=None, swap_w13_slices=swaps, **shared
        )
        names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
        handed_on = {f"{name}_lora": part for name, part in zip(names, state, strict=False)}
        self.mixin.apply_w2_lora(
            context, y=z, x=act, token_lora_mapping=state[3], **handed_on, **shared
        )
        for row, slot in enumerate(slots):
            for choice, expert in enumerate(ids[row].tolist() if slot >= 0 else ()):
                w13, w2 = self._delta(slot, expert, x[row], act[row * TOP_K + choice], swaps)
                wanted_y[row, choice] += w13
                wanted_z[row, choice] += weights[row, choice] * w2
        torch.testing.assert_close(y, wanted_y, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(z, wanted_z, rtol=1e-4, atol=1e-3)

    def _delta(
        self, slot: int, expert: int, x: Tensor, act: Tensor, swaps: bool
    ) -> tuple[Tensor, Tensor]:
        layer, outer = self.layer, 0 if self.layer.shared else expert
        parts = [
            b[slot, expert] @ (a[slot, outer] @ x)
            for a, b in zip(layer.w13_lora_a_stacked, layer.w13_lora_b_stacked, strict=True)
        ]
        (a,), (b,) = layer.w2_lora_a_stacked, layer.w2_lora_b_stacked
        return torch.cat(parts[::-1] if swaps else parts), b[slot, outer] @ (a[slot, expert] @ act)


@pytest.fixture
def plain() -> Server:
    return Server(StandInWrapper)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("slices", [1, 2])
def test_each_pair_gets_the_adapter_of_its_token_and_expert(
    server: Server, mixin: Any, slices: int, shared: bool
) -> None:
    experts = Experts(server, mixin, slices, shared=shared)
    server.step(MIXED)
    experts.apply(MIXED)
    assert launch_counts()["experts"].launched == 2


@pytest.mark.parametrize("adds", [True, False])
def test_slices_in_the_other_order_are_written_in_that_order(
    plain: Server, mixin: Any, adds: bool
) -> None:
    experts = Experts(plain, mixin)
    plain.step(MIXED)
    experts.apply(MIXED, swaps=True, adds=adds)
    experts.apply(MIXED, swaps=False, adds=adds)


def test_a_padded_step_and_one_of_base_rows_follow_each_other(plain: Server, mixin: Any) -> None:
    experts = Experts(plain, mixin)
    for slots, rows in ((MIXED, 8), ((-1, -1), 4), ((1,), 1), ((-1, 0), 2)):
        plain.step(slots)
        experts.apply(slots, rows=rows)
    assert launch_counts()["experts"].left_out == 2


def test_layers_that_run_one_after_the_other_share_their_tables(plain: Server, mixin: Any) -> None:
    first, second = Experts(plain, mixin), Experts(plain, mixin, 1)
    plain.step(MIXED)
    second.apply(MIXED)
    first.apply(MIXED)
    assert len(plain.wrapper._pairs) == 1


def test_ids_of_another_integer_type_are_taken(plain: Server, mixin: Any) -> None:
    experts = Experts(plain, mixin)
    routes = experts.routes
    experts.routes = lambda rows: (routes(rows)[0].long(), routes(rows)[1])  # type: ignore[method-assign]
    plain.step(MIXED)
    experts.apply(MIXED)
