"""A MoE layer or delta refuses what it cannot use, and changes nothing before it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.layers.moe_partition import MoERank
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.delta.ops import MoEPath, MoEWorkspace, moe_delta
from lorakernels.moe.layer.ops import ExpertBuffers, ExpertLoRA, run_experts

EXPERTS, HIDDEN, INTER, SLOTS, TOKENS = 2, 16, 8, 2, 3
SIZES = {"max_tokens": TOKENS, "top_k": 1}


def weights() -> tuple[Tensor, Tensor]:
    return torch.ones(EXPERTS, 2 * INTER, HIDDEN), torch.ones(EXPERTS, HIDDEN, INTER)


def make_pairs(
    *,
    experts: int = EXPERTS,
    slots: int = SLOTS,
    with_base: bool = True,
    device: str = "cpu",
) -> PairMetadata:
    return PairMetadata(
        **SIZES, num_experts=experts, max_slots=slots, device=device, with_base=with_base
    )


class Scene:
    """A layer and a batch that is prepared but for its pairs."""

    def __init__(self) -> None:
        self.layer = FusedMoELoRA(*weights(), gate_up=GateUp.HALVES, num_slots=SLOTS, rank=1)
        self.batch = BatchMetadata(max_tokens=TOKENS, max_slots=SLOTS, device="cpu")
        self.batch.prepare(torch.zeros(TOKENS, dtype=torch.int32))
        self.scratch = MoEScratch([self.layer], **SIZES)
        self.x, self.router = torch.ones(TOKENS, HIDDEN), torch.ones(TOKENS, 1)
        self.ids = torch.zeros(TOKENS, 1, dtype=torch.int32)

    def prepared(self) -> PairMetadata:
        pairs = make_pairs()
        pairs.prepare(self.ids, self.batch)
        return pairs

    def run_layer(self, pairs: PairMetadata) -> Tensor:
        return self.layer(self.x, self.ids, self.router, self.batch, pairs, self.scratch)

    def run_delta(self, pairs: PairMetadata, workspace: MoEWorkspace, out: Tensor) -> None:
        moe_delta(self.x, self.layer.w13_slots, pairs, workspace, out, path=MoEPath.ONE_SHOT)

    def run_experts(self, pairs: PairMetadata, workspace: MoEWorkspace) -> None:
        lora = ExpertLoRA(self.layer.w13_slots, self.layer.w2_slots, workspace)
        out, buffers = torch.zeros_like(self.x), self.scratch.buffers
        run_experts(self.x, *weights(), self.router, pairs, buffers, out, lora=lora)


def test_experts_without_adapters_are_the_base_also_of_rows_with_a_slot() -> None:
    scene, found = Scene(), []
    buffers = scene.scratch.buffers
    for slot in (0, -1):
        scene.batch.prepare(torch.full((TOKENS,), slot, dtype=torch.int32))
        out = torch.zeros_like(scene.x)
        run_experts(scene.x, *weights(), scene.router, scene.prepared(), buffers, out)
        found.append(out)
    assert torch.equal(*found)
    assert found[0].any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_pairs(with_base=False),
            "pairs must be made with_base, for the product of the base layer",
        ),
        (
            lambda: make_pairs(experts=3),
            "adapters of w13 must have 2 slots and 3 experts (got 2 and 2)",
        ),
    ],
)
def test_pairs_that_do_not_fit_a_layer_keep_the_step_that_they_are_prepared_for(
    make: Callable[[], PairMetadata], message: str
) -> None:
    scene, pairs = Scene(), make()
    earlier = BatchMetadata(max_tokens=TOKENS, max_slots=SLOTS, device="cpu")
    earlier.prepare(torch.tensor([1, -1], dtype=torch.int32))
    pairs.prepare(torch.tensor([[1], [0]], dtype=torch.int32), earlier)
    before = [table.clone() for table in pairs.buffers]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        scene.run_layer(pairs)
    assert pairs.num_rows == 2
    assert all(map(torch.equal, pairs.buffers, before))


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(1, 2 * INTER).expand(TOKENS, 2 * INTER),
        torch.zeros(TOKENS, 1).expand(TOKENS, 2 * INTER),
        torch.zeros(64).as_strided((TOKENS, 2 * INTER), (1, 1)),
    ],
)
def test_an_output_of_a_delta_that_overlaps_itself_is_refused(out: Tensor) -> None:
    scene = Scene()
    with pytest.raises(ValueError, match=r"^out must not overlap itself in memory"):
        scene.run_delta(scene.prepared(), scene.scratch.workspace, out)


WRONG_OPERANDS: tuple[tuple[dict[str, Tensor], str], ...] = (
    ({"out": torch.zeros(TOKENS, 2 * INTER + 1)}, f"out must be [{TOKENS}, {2 * INTER}]"),
    ({"out": torch.zeros(TOKENS + 1, 2 * INTER)}, f"out must be [{TOKENS}, {2 * INTER}]"),
    ({"out": torch.zeros(TOKENS, 2 * INTER).half()}, "out must be torch.float32 like the weights"),
    ({"out": torch.zeros(1, 2 * INTER).expand(TOKENS, -1)}, "out must not overlap itself"),
    ({"x": torch.ones(TOKENS, HIDDEN - 1)}, f"x must have {HIDDEN} columns"),
    ({"x": torch.ones(TOKENS, HIDDEN).half()}, "x must be torch.float32 like the weights"),
    ({"router_weights": torch.ones(TOKENS, 1).half()}, "router_weights must be float32 with 3"),
    ({"router_weights": torch.ones(TOKENS + 1, 1)}, "router_weights must be float32 with 3"),
    ({"router_weights": torch.ones(TOKENS, 2)[:, :1]}, "router_weights must be contiguous"),
)


@pytest.mark.parametrize("has_adapters", [True, False])
@pytest.mark.parametrize(("change", "message"), WRONG_OPERANDS)
def test_wrong_operands_of_a_delta_are_refused_also_in_steps_that_are_said_to_have_no_adapter(
    change: dict[str, Tensor], message: str, has_adapters: bool
) -> None:
    scene = Scene()
    operands = {"x": scene.x, "out": torch.zeros(TOKENS, 2 * INTER), "router_weights": None}
    x, out, router = (operands | change).values()
    assert x is not None
    assert out is not None
    with nullcontext() if has_adapters else scene.batch.without_adapters(TOKENS):
        pairs = scene.prepared()
        with pytest.raises(ValueError, match=re.escape(message)):
            moe_delta(
                x, scene.layer.w13_slots, pairs, scene.scratch.workspace, out, router_weights=router
            )


def test_an_output_whose_columns_are_far_apart_does_not_overlap_itself() -> None:
    scene = Scene()
    out = torch.zeros(2 * INTER, TOKENS).t()
    scene.run_delta(scene.prepared(), scene.scratch.workspace, out)


def test_an_output_of_a_layer_that_overlaps_itself_is_refused() -> None:
    scene = Scene()
    out = torch.zeros(1, HIDDEN).expand(TOKENS, HIDDEN)
    buffers = ExpertBuffers(
        **SIZES, hidden=HIDDEN, intermediate=INTER, dtype=out.dtype, device="cpu"
    )
    with pytest.raises(ValueError, match=r"^out must be contiguous"):
        run_experts(scene.x, *weights(), scene.router, scene.prepared(), buffers, out)


@pytest.mark.parametrize("name", ["pairs", "workspace"])
def test_tables_and_workspace_of_another_device_are_refused(name: str) -> None:
    scene = Scene()
    pairs, workspace = scene.prepared(), scene.scratch.workspace
    if name == "pairs":
        pairs = make_pairs(device="meta")
    else:
        workspace.shrunk = workspace.shrunk.to("meta")
    message = rf"^{name} must be on cpu \(got meta\)$"
    with pytest.raises(ValueError, match=message):
        scene.run_delta(pairs, workspace, torch.zeros(TOKENS, 2 * INTER))
    with pytest.raises(ValueError, match=message):
        scene.run_experts(pairs, workspace)


def test_a_layer_is_built_on_the_device_of_its_weights_whatever_the_default_is() -> None:
    w13, w2 = weights()
    with torch.device("meta"):
        layer = FusedMoELoRA(
            w13,
            w2,
            gate_up=GateUp.HALVES,
            num_slots=SLOTS,
            rank=1,
            place=MoERank(ep_size=2, ep_rank=1),
        )
    assert layer.routing.expert_map.tolist() == [-1, 0]


def test_a_workspace_that_is_too_small_for_a_layer_is_refused() -> None:
    scene = Scene()
    pairs, workspace = scene.prepared(), scene.scratch.workspace
    workspace.shrunk = workspace.shrunk[:1]
    with pytest.raises(ValueError, match=r"^workspace must hold \d+ pairs of \d+ ranks"):
        scene.run_experts(pairs, workspace)


def test_tables_have_room_for_base_rows_only_where_that_is_asked_for() -> None:
    plain = PairMetadata(**SIZES, num_experts=EXPERTS, max_slots=SLOTS, device="cpu")
    assert not plain.with_base
    assert (len(plain.base_experts), len(plain.base_pairs)) == (1, 1)
    assert len(make_pairs().base_pairs) > 1


@pytest.mark.parametrize("has_adapters", [True, False])
def test_experts_refuse_pairs_without_base_tiles_whether_they_have_adapters_or_not(
    has_adapters: bool,
) -> None:
    scene, pairs = Scene(), make_pairs(with_base=False)
    pairs.prepare(scene.ids, scene.batch)
    slots = scene.layer.w13_slots, scene.layer.w2_slots
    lora = ExpertLoRA(*slots, scene.scratch.workspace) if has_adapters else None
    operands = scene.x, *weights(), scene.router, pairs, scene.scratch.buffers
    with pytest.raises(ValueError, match=r"^pairs must be made with_base"):
        run_experts(*operands, torch.zeros_like(scene.x), lora=lora)


def test_pairs_that_were_never_prepared_are_refused() -> None:
    scene, pairs = Scene(), make_pairs()
    workspace = MoEWorkspace([scene.layer.w13_slots, scene.layer.w2_slots], **SIZES)
    out = torch.zeros(TOKENS, 2 * INTER)
    with pytest.raises(ValueError, match=r"x must have 0 rows .*as the pairs were prepared for"):
        scene.run_delta(pairs, workspace, out)
    assert not out.any()
    with pytest.raises(ValueError, match=r"x must be \[0, 16\] \(got \[3, 16\]\)"):
        scene.run_experts(pairs, workspace)
