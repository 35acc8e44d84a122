"""Rows, experts and slots that lie 2^31 elements apart in memory; steps that start before their
input is written, or while the device is still busy with others."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from loragate.core.machine import detect_machine, select_interpreter

select_interpreter()

from loragate.execution.busy import keep_busy  # noqa: E402
from loragate.inputs.placement import bits_of  # noqa: E402
from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.common.stacked_weights import SlotTensors  # noqa: E402
from lorakernels.dense.launch import TileTables, launch_expand, launch_shrink  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace, dense_delta  # noqa: E402
from lorakernels.dense.shape import DenseShape  # noqa: E402
from lorakernels.dense.sizes import plan_shrunk  # noqa: E402
from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.delta import launch as moe_launch  # noqa: E402
from lorakernels.moe.delta.ops import MoEPath, MoEWorkspace, moe_delta  # noqa: E402
from lorakernels.moe.layer import check as layer_check  # noqa: E402
from lorakernels.moe.layer.launch import launch_sum  # noqa: E402
from lorakernels.moe.weights import ExpertFactors, ExpertWeights  # noqa: E402

MACHINE = detect_machine()
# the last of three lies 2^31 elements after the first, one more than an int32 can count
FAR, SIZE = 1 << 30, 3
BLOCK = 1024
# about a millisecond
SPINS = 200_000

compiled_only = pytest.mark.skipif(MACHINE.interpreted, reason="needs compiled kernels on a GPU")
early_launches = pytest.mark.skipif(
    (MACHINE.compute_capability or (0, 0)) < (9, 0),
    reason="needs a GPU from sm_90 on: no other starts a kernel before its predecessor has ended",
)


@triton.jit
def late_copy_kernel(source_ptr, target_ptr, sink_ptr, count, spins, BLOCK: tl.constexpr):
    """Lets its successor start long before it has written anything, as other kernels of a model may
    do (programmatic dependent launch)."""
    gdc_launch_dependents()
    program = tl.program_id(0)
    turns = tl.load(sink_ptr + program)
    for _ in range(spins):
        turns = turns * 0.5 + 0.25
    tl.store(sink_ptr + program, turns)
    offs = program * BLOCK + tl.arange(0, BLOCK)
    # always true, but known only after the loop
    mask = (offs < count) & (turns < 2.0)
    tl.store(target_ptr + offs, tl.load(source_ptr + offs, mask=mask), mask=mask)


def copy_late(source: Tensor, target: Tensor) -> None:
    programs = -(-source.numel() // BLOCK)
    sink = torch.zeros(programs, device=source.device)
    late_copy_kernel[(programs,)](source, target, sink, source.numel(), SPINS, BLOCK=BLOCK)


def quarters(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 4, shape, generator=generator).to(dtype) / 4


@dataclass
class Dense:
    """A linear layer with two adapters that rows use in turn."""

    dtype: torch.dtype
    in_features: int
    width: int
    rank: int
    rows: int

    def __post_init__(self) -> None:
        self.weights = SlotWeights(
            num_slots=2,
            slice_widths=(self.width,),
            in_features=self.in_features,
            rank=self.rank,
            dtype=self.dtype,
            device=MACHINE.device,
        )
        for slot in range(2):
            a = quarters(self.rank, self.in_features, dtype=self.dtype, seed=slot)
            b = quarters(self.width, self.rank, dtype=self.dtype, seed=2 + slot)
            self.weights.load(slot, [LoRAFactors(a, b, 1.0)])
        self.batch = BatchMetadata(max_tokens=self.rows, max_slots=2, device=MACHINE.device)
        self.batch.prepare(torch.arange(self.rows, dtype=torch.int32) % 2)
        self.workspace = DenseWorkspace([self.weights], max_tokens=self.rows)

    def run(self, x: Tensor, out: Tensor) -> Tensor:
        dense_delta(x, self.weights, self.batch, self.workspace, out)
        return out.contiguous()


@dataclass
class Experts:
    """Three slots and three experts; row i goes to slot i and expert i, modulo three."""

    dtype: torch.dtype
    in_features: int
    width: int
    rank: int
    rows: int
    path: MoEPath
    # equally wide
    slices: int = 1

    def __post_init__(self) -> None:
        device = MACHINE.device
        self.weights = ExpertWeights(
            num_slots=SIZE,
            num_experts=SIZE,
            slice_widths=(self.width,) * self.slices,
            in_features=self.in_features,
            rank=self.rank,
            dtype=self.dtype,
            device=device,
        )
        for slot in range(SIZE):
            a = quarters(SIZE, self.rank, self.in_features, dtype=self.dtype, seed=slot)
            b = quarters(SIZE, self.width, self.rank, dtype=self.dtype, seed=SIZE + slot)
            scales = range(1, 1 + self.slices)
            self.weights.load(slot, [ExpertFactors(a, b, float(scale)) for scale in scales])
        index = torch.arange(self.rows, dtype=torch.int32) % SIZE
        batch = BatchMetadata(max_tokens=self.rows, max_slots=SIZE, device=device)
        batch.prepare(index)
        self.pairs = PairMetadata(
            max_tokens=self.rows, top_k=1, num_experts=SIZE, max_slots=SIZE, device=device
        )
        self.pairs.prepare(index[:, None].contiguous().to(device), batch)
        self.workspace = MoEWorkspace([self.weights], max_tokens=self.rows, top_k=1)

    def run(self, x: Tensor, out: Tensor) -> Tensor:
        moe_delta(x, self.weights, self.pairs, self.workspace, out, path=self.path)
        return out.contiguous()


@pytest.fixture(scope="module")
def memory() -> Tensor:
    """fp16, of which only what is written takes memory. An offset that wraps around stays inside:
    it reads zeros instead of ending the process."""
    elements = 5 * (1 << 30) + 4096
    if MACHINE.device == "cuda":
        return torch.zeros(elements, dtype=torch.float16, device="cuda")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.float16)
    except (OSError, ValueError) as error:
        pytest.skip(f"no address range of {2 * elements} bytes: {error}")


def far(memory: Tensor, values: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`values` at these strides in the middle of the memory."""
    return memory.as_strided(values.shape, strides, storage_offset=1 << 31).copy_(values)


def assert_far_operands_change_nothing(layer: Dense | Experts, memory: Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (SIZE, SIZE), generator=generator) * 2 - 1
    x, run = signs.to(torch.float16).to(MACHINE.device), layer.run
    near = torch.zeros(SIZE, sum(layer.weights.slice_widths), dtype=x.dtype, device=x.device)
    wanted = bits_of(run(x, near.clone()))
    assert wanted.count_nonzero()
    assert torch.equal(bits_of(run(far(memory, x, (FAR, 1)), near.clone())), wanted), "rows of x"
    columns = far(memory, x, (1, FAR))
    assert torch.equal(bits_of(run(columns, near.clone())), wanted), "columns of x"
    assert torch.equal(bits_of(run(x, far(memory, near, (FAR, 1)))), wanted), "rows of out"
    # the last one lies at least 2^31 elements after the first, and so does a second slice
    first = layer.weights.slice_widths[0]
    apart = -(-(1 << 31) // min(first, near.shape[1] - 1))
    assert torch.equal(bits_of(run(x, far(memory, near, (1, apart)))), wanted), "columns of out"


def test_rows_and_columns_of_a_linear_layer_may_be_2_to_the_31_elements_apart(
    memory: Tensor,
) -> None:
    assert_far_operands_change_nothing(Dense(torch.float16, SIZE, SIZE, 2, SIZE), memory)


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("path", list(MoEPath))
def test_rows_and_columns_of_pairs_may_be_2_to_the_31_elements_apart(
    path: MoEPath, slices: int, memory: Tensor
) -> None:
    layer = Experts(torch.float16, SIZE, SIZE - slices + 1, 2, SIZE, path, slices)
    assert_far_operands_change_nothing(layer, memory)


def test_two_slices_of_one_program_may_be_2_to_the_31_elements_apart(
    memory: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a large batch plans it so
    plan = moe_launch.plan_one_shot
    monkeypatch.setattr(
        moe_launch, "plan_one_shot", lambda shape: replace(plan(shape), paired=True)
    )
    layer = Experts(torch.float16, SIZE, SIZE - 1, 2, SIZE, MoEPath.ONE_SHOT, 2)
    assert_far_operands_change_nothing(layer, memory)


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("axis", [0, 1], ids=["slots", "experts"])
@pytest.mark.parametrize("path", list(MoEPath))
def test_slots_and_experts_may_be_2_to_the_31_elements_apart(
    path: MoEPath, axis: int, side: str, memory: Tensor
) -> None:
    layer = Experts(torch.float16, SIZE, SIZE, 2, SIZE, path)
    x = torch.ones(SIZE, SIZE, dtype=torch.float16, device=MACHINE.device)
    wanted = layer.run(x, torch.zeros_like(x))
    own = getattr(layer.weights, side)
    strides = list(own.stride())
    # neighbours on the other axis stay neighbours
    strides[axis], strides[1 - axis] = FAR, own[0, 0].numel()
    setattr(layer.weights, side, far(memory, own, tuple(strides)))
    assert torch.equal(layer.run(x, torch.zeros_like(x)), wanted)


@pytest.mark.parametrize("side", ["w13", "w2"])
def test_weights_of_experts_may_be_2_to_the_31_elements_apart(
    side: str, memory: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    w13 = quarters(SIZE, 2 * SIZE, SIZE, dtype=torch.float16, seed=1)
    w2 = quarters(SIZE, SIZE, SIZE, dtype=torch.float16, seed=2)
    layer = layer_of_experts(w13.to(MACHINE.device), w2.to(MACHINE.device))
    wanted = base_of_experts(layer)
    assert wanted.count_nonzero()
    # as far as those of more experts than a test has memory for, which are contiguous
    monkeypatch.setattr(layer_check, "_check_operand", lambda *_, **__: None)
    near = getattr(layer, side)
    near.data = far(memory, near.data, (FAR, SIZE, 1))
    assert getattr(layer, side).stride(0) == FAR
    assert torch.equal(base_of_experts(layer), wanted)


@pytest.mark.parametrize("side", ["y", "out"])
def test_rows_that_are_added_up_may_be_2_to_the_31_elements_apart(
    side: str, memory: Tensor
) -> None:
    layer = Experts(torch.float16, SIZE, SIZE, 2, SIZE, MoEPath.TWO_KERNEL)
    y = quarters(SIZE, SIZE, dtype=torch.float16, seed=1).to(MACHINE.device)
    out = torch.zeros_like(y)
    if side == "y":
        launch_sum(far(memory, y, (FAR, 1)), layer.pairs.tables, out, pdl=False)
    else:
        out = far(memory, out, (FAR, 1))
        launch_sum(y, layer.pairs.tables, out, pdl=False)
    # with one expert for each token
    assert torch.equal(out.contiguous(), y)


def layer_of_experts(w13: Tensor, w2: Tensor) -> FusedMoELoRA:
    projections = ("gate_proj", "up_proj", "down_proj")
    return FusedMoELoRA(
        w13, w2, num_slots=1, rank=2, projections=projections, gate_up=GateUp.HALVES
    )


def base_of_experts(layer: FusedMoELoRA) -> Tensor:
    """The output of a layer whose row i goes to expert i, with an adapter that has no ranks."""
    device = MACHINE.device
    batch = BatchMetadata(max_tokens=SIZE, max_slots=1, device=device)
    batch.prepare(torch.zeros(SIZE, dtype=torch.int32))
    pairs = PairMetadata(
        max_tokens=SIZE, top_k=1, num_experts=SIZE, max_slots=1, device=device, with_base=True
    )
    scratch = MoEScratch([layer], max_tokens=SIZE, top_k=1)
    x = torch.ones(SIZE, SIZE, dtype=torch.float16, device=device)
    ids = torch.arange(SIZE, dtype=torch.int32, device=device)[:, None]
    return layer(x, ids, torch.ones(SIZE, 1, device=device), batch, pairs, scratch)


def test_slots_of_a_linear_layer_may_be_2_to_the_31_elements_apart(memory: Tensor) -> None:
    # so many slots that a mapping of them would take long: one tile of the last slot is enough
    size, rank, last = 64, 16, 1 << 21
    generator = torch.Generator().manual_seed(0)
    x, a, b = (
        torch.randint(-1, 2, shape, generator=generator).half().to(MACHINE.device)
        for shape in ((SIZE, size), (rank, size), (size, rank))
    )
    shape = DenseShape(SIZE, size, (size,), rank, 2)
    rows = torch.full((shape.height,), -1, dtype=torch.int32)
    rows[:SIZE] = torch.arange(SIZE)
    one = torch.ones(1, dtype=torch.int32, device=MACHINE.device)
    tiles = TileTables(one * last, rows.to(MACHINE.device), one)
    ranks = torch.zeros(last + 1, 1, dtype=torch.int32, device=MACHINE.device)
    ranks[last] = rank
    # an offset that wraps around stays in the memory
    factors = memory[1 << 31 :][: (last + 1) * rank * size]
    slots = SlotTensors(
        factors.view(last + 1, 1, rank, size),
        factors.view(last + 1, size, rank),
        ranks,
        ranks + 0.0,
    )
    slots.a[last] = a
    shrunk = torch.zeros(plan_shrunk(shape, 1), device=MACHINE.device)
    launch_shrink(x, slots, shape, tiles, shrunk, pdl=False)
    h = shrunk.sum(0)[:SIZE]
    assert torch.equal(h, x.float() @ a.float().T)
    slots.b[last] = b
    out = torch.zeros(SIZE, size, dtype=torch.float16, device=MACHINE.device)
    launch_expand(shrunk, slots, shape, tiles, out, pdl=False)
    assert torch.equal(out.float(), rank * (h @ b.float().T))


def assert_it_waits(layer: Dense | Experts) -> None:
    """A step after kernels that write its input, or the output that it adds to, only after the step
    was allowed to start; and with nothing left in the shrink output from an earlier one."""
    x = torch.randn(16, 8192, device="cuda", dtype=torch.bfloat16)
    base = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16)
    wanted = bits_of(layer.run(x, base.clone()))
    for attempt in range(20):
        late_x, late_out = torch.zeros_like(x), torch.zeros_like(base)
        layer.workspace.shrunk.fill_(float("nan"))
        torch.cuda.synchronize()
        copies = [(x, late_x, "x"), (base, late_out, "out")]
        # the last one is still at work when the step starts
        copies = copies if attempt % 2 else copies[::-1]
        for source, target, _ in copies:
            copy_late(source, target)
        layer.run(late_x, late_out)
        torch.cuda.synchronize()
        assert torch.equal(bits_of(late_out), wanted), f"{copies[-1][2]} or the shrink output"


@early_launches
def test_a_linear_layer_waits_for_its_input_its_output_and_its_own_shrink() -> None:
    assert_it_waits(Dense(torch.bfloat16, 8192, 2048, 64, 16))


@early_launches
@pytest.mark.parametrize("path", list(MoEPath))
def test_a_delta_of_pairs_waits_for_its_input_its_output_and_its_own_shrink(path: MoEPath) -> None:
    assert_it_waits(Experts(torch.bfloat16, 8192, 2048, 64, 16, path))


@compiled_only
def test_queued_steps_have_their_own_mappings_and_never_wait_for_the_device() -> None:
    layer = Dense(torch.bfloat16, 256, 256, 16, 64)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    mappings = [(torch.arange(64, dtype=torch.int32) // step) % 3 - 1 for step in range(1, 9)]

    def run(pause: Callable[[], object]) -> list[Tensor]:
        outs = [torch.zeros_like(x) for _ in mappings]
        for mapping, out in zip(mappings, outs, strict=True):
            pause()
            layer.batch.prepare(mapping)
            layer.run(x, out)
        return outs

    wanted = run(torch.cuda.synchronize)
    torch.cuda.synchronize()
    done = keep_busy()
    # an operation that waits for the device raises
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(lambda: None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not done.query(), "nothing was late: the host took longer, or waited for pinned memory"
    torch.cuda.synchronize()
    for out, right in zip(found, wanted, strict=True):
        assert torch.equal(bits_of(out), bits_of(right))
