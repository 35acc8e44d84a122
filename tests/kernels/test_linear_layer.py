from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from loragate.core.machine import detect_machine, select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.weights import LoRAFactors  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.partition import Parallel, Slice  # noqa: E402
from lorakernels.moe.weights import ExpertFactors  # noqa: E402

DEVICE = detect_machine().device
K, SLOTS, RANK = 24, 3, 8
# grouped-query attention: 4 query heads, 2 key and value heads of 4
QKV = (Slice("q", 16, heads=4), Slice("k", 8, heads=2), Slice("v", 8, heads=2))
GATE_UP = (Slice("gate", 20, padded_width=32), Slice("up", 20, padded_width=32))
ROWS = torch.tensor([2, -1, 0, 0, 1, -1, 2, 0, 2], dtype=torch.int32)

Adapter = dict[str, LoRAFactors]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def factors(rank: int, width: int, seed: int, in_features: int = K) -> LoRAFactors:
    return LoRAFactors(
        randn(rank, in_features, seed=seed), randn(width, rank, seed=seed + 1), 0.5 + seed % 7
    )


def adapters(slices: Sequence[Slice], in_features: int = K) -> list[Adapter]:
    """One adapter a slot; ranks differ by slot and slice, and one slice is absent."""
    ranks = ((8, 3, 5, 2), (1, 8, 2, 7), (6, 4, 8, 3))
    pool = [
        {s.name: factors(r, s.width, 100 * slot + 10 * i, in_features) for i, (s, r) in pairs}
        for slot, row in enumerate(ranks)
        for pairs in [list(enumerate(zip(slices, row, strict=False)))]
    ]
    del pool[1][slices[0].name]
    return pool


def base(slices: Sequence[Slice], in_features: int = K) -> tuple[Tensor, Tensor]:
    width = sum(s.width for s in slices)
    return randn(width, in_features, seed=1), randn(width, seed=2)


def layer(slices: Sequence[Slice], **options: object) -> LoRALinear:
    weight, bias = base(slices)
    return LoRALinear(weight, bias, slices=slices, num_slots=SLOTS, rank=RANK, **options)  # type: ignore[arg-type]


def serve(linear: LoRALinear, x: Tensor, rows: Tensor = ROWS) -> Tensor:
    metadata = BatchMetadata(max_tokens=16, max_slots=SLOTS, device=DEVICE)
    metadata.prepare(rows.to(DEVICE))
    return linear(x, metadata, DenseWorkspace([linear.slots], max_tokens=16))


def load(linear: LoRALinear, pool: Sequence[Adapter]) -> LoRALinear:
    for slot, adapter in enumerate(pool):
        linear.load_adapter(slot, adapter)
    return linear


def expected(
    x: Tensor, slices: Sequence[Slice], pool: Sequence[Mapping[str, LoRAFactors]]
) -> list[Tensor]:
    """The output of each slice in fp64, from whole tensors and row by row."""
    weight, bias = (t.double() for t in base(slices, x.shape[1]))
    out = x.double() @ weight.T + bias
    columns = list(out.split([s.width for s in slices], dim=1))
    for row, slot in enumerate(ROWS.tolist()):
        for part, target in zip(slices, columns, strict=True):
            if slot >= 0 and part.name in pool[slot]:
                f = pool[slot][part.name]
                target[row] += f.scale * (x[row].double() @ f.a.double().T) @ f.b.double().T
    return columns


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


def state(linear: LoRALinear) -> list[Tensor]:
    slots = linear.slots
    return [t.clone() for t in (slots.a, slots.b, slots.ranks, slots.scales)]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_each_row_gets_its_own_adapter_and_base_rows_get_none() -> None:
    pool, x = adapters(QKV), randn(9, K, seed=3)
    linear = load(layer(QKV), pool)
    out = serve(linear, x)
    assert_close(out, torch.cat(expected(x, QKV, pool), dim=1))
    plain = F.linear(x, linear.weight, linear.bias)
    assert torch.equal(out[ROWS == -1], plain[ROWS == -1])
    assert not torch.isclose(out[ROWS != -1], plain[ROWS != -1]).all(dim=1).any()


def test_leading_dimensions_and_strides_of_the_input_do_not_matter() -> None:
    pool = adapters(QKV)
    linear = load(layer(QKV), pool)
    cut = randn(3, 3, K + 5, seed=3)[..., 2 : K + 2]
    rows = cut.reshape(9, K)
    want = torch.cat(expected(rows, QKV, pool), dim=1)
    for x in (cut, cut.transpose(0, 1).contiguous().transpose(0, 1), rows.T.contiguous().T):
        out = serve(linear, x)
        assert out.shape == (*x.shape[:-1], 32)
        assert_close(out.view(9, 32), want)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_column_parallel_ranks_together_give_the_whole_layer(tp: int) -> None:
    # tp 4 is twice the number of kv heads (sglang #24420)
    pool, x = adapters(QKV), randn(9, K, seed=3)
    whole = expected(x, QKV, pool)
    for rank in range(tp):
        linear = layer(QKV, parallel=Parallel.COLUMN, tp_size=tp, tp_rank=rank)
        out = serve(load(linear, pool), x)
        sizes = [16 // tp, 8 // min(tp, 2), 8 // min(tp, 2)]
        assert out.shape[1] == sum(sizes)
        for part, want, size in zip(out.split(sizes, dim=1), whole, sizes, strict=True):
            holder = rank // (tp * size // want.shape[1])
            assert_close(part, want[:, holder * size : (holder + 1) * size])


def test_shards_of_a_padded_width_take_the_adapter_at_its_unpadded_position() -> None:
    # 20 columns padded to 32 over 4 ranks: 8, 8, 4 and none
    pool, x = adapters(GATE_UP), randn(9, K, seed=3)
    whole = expected(x, GATE_UP, pool)
    for rank in range(4):
        linear = layer(GATE_UP, parallel=Parallel.COLUMN, tp_size=4, tp_rank=rank)
        out = serve(load(linear, pool), x)
        for part, want in zip(out.split(8, dim=1), whole, strict=True):
            live = want[:, 8 * rank : 8 * rank + 8]
            assert_close(part[:, : live.shape[1]], live)
            assert not part[:, live.shape[1] :].any()


# the whole slice and nothing but padding; a part of one slice beside all of the other; odd widths
PADDED = [
    (4, (Slice("gate", 20, padded_width=80), Slice("up", 20, padded_width=80))),
    (2, (Slice("gate", 20, padded_width=40), Slice("up", 20, padded_width=20))),
    (2, (Slice("a", 21, padded_width=22), Slice("b", 13, padded_width=26), Slice("c", 5, 1))),
    (4, (Slice("a", 21, padded_width=24), Slice("b", 13, padded_width=16), Slice("c", 3, 1))),
]


@pytest.mark.parametrize(("tp", "slices"), PADDED)
def test_each_rank_serves_its_own_part_of_padded_slices_and_zeros_behind_it(
    tp: int, slices: tuple[Slice, ...]
) -> None:
    pool, x = adapters(slices), randn(9, K, seed=3)
    whole = expected(x, slices, pool)
    for rank in range(tp):
        linear = layer(slices, parallel=Parallel.COLUMN, tp_size=tp, tp_rank=rank)
        out = serve(load(linear, pool), x)
        sizes = [s.width if s.heads else (s.padded_width or s.width) // tp for s in slices]
        for part, name, want, size in zip(
            out.split(sizes, dim=1), slices, whole, sizes, strict=True
        ):
            live = want if name.heads else want[:, size * rank : size * (rank + 1)]
            assert_close(part[:, : live.shape[1]], live)
            assert not part[:, live.shape[1] :].any()


@pytest.mark.parametrize(("tp", "padded"), [(1, None), (2, None), (2, 2 * K), (3, 27), (4, 32)])
def test_row_parallel_ranks_sum_up_to_the_whole_layer(tp: int, padded: int | None) -> None:
    # the bias once, the scale once, and K cut at the unpadded width
    slices = (Slice("down", 20),)
    pool, x = adapters(slices), randn(9, K, seed=3)
    size = (padded or K) // tp
    wide = F.pad(x, [0, size * tp - K])
    total = torch.zeros(9, 20, dtype=torch.float64, device=DEVICE)
    for rank in range(tp):
        linear = layer(
            slices, parallel=Parallel.ROW, tp_size=tp, tp_rank=rank, padded_in_features=padded
        )
        part = serve(load(linear, pool), wide[:, rank * size : (rank + 1) * size])
        total += part.double()
    assert_close(total, expected(x, slices, pool)[0])


def test_a_replicated_layer_is_the_same_on_each_rank() -> None:
    pool, x = adapters(QKV), randn(9, K, seed=3)
    first, last = (serve(load(layer(QKV, tp_size=3, tp_rank=rank), pool), x) for rank in (0, 2))
    assert torch.equal(first, last)
    assert_close(first, torch.cat(expected(x, QKV, pool), dim=1))


def test_a_fused_module_serves_its_slices_and_leaves_the_others() -> None:
    # a fused projection of four slices, an adapter with qkv and z (vllm #36309)
    slices = (*QKV, Slice("z", 16))
    fused = {"in_proj_qkv": ("q", "k", "v")}
    qkv, z = factors(4, 32, 7), factors(3, 16, 9)
    rows = qkv.b.split([16, 8, 8])
    apart = {n: LoRAFactors(qkv.a, b, qkv.scale) for n, b in zip("qkv", rows, strict=True)}
    for tp in (1, 2):
        options = {"parallel": Parallel.COLUMN, "tp_size": tp, "tp_rank": tp - 1}
        packed, split = layer(slices, fused=fused, **options), layer(slices, **options)
        for parts in ({}, {"z": z}):
            packed.load_adapter(1, {"in_proj_qkv": qkv, **parts})
            split.load_adapter(1, {**apart, **parts})
            assert same(state(packed), state(split))
            assert packed.slots.ranks[1].tolist() == [4, 4, 4, 3 * len(parts)]


@pytest.mark.parametrize("members", [("q",), ("v",), ("q", "k"), ("k", "v"), ("q", "k", "v")])
def test_any_run_of_slices_may_be_one_module(members: tuple[str, ...]) -> None:
    linear = layer(QKV, fused={"one": members})
    covered = tuple("qkv".index(member) for member in members)
    assert linear.parts["one"] == covered
    width = sum(QKV[index].width for index in covered)
    linear.load_adapter(0, {"one": factors(2, width, 7)})
    assert [bool(rank) for rank in linear.slots.ranks[0]] == [i in covered for i in range(3)]


def test_every_packed_slice_gets_its_own_factors() -> None:
    # unsloth-zoo #941: gate twice, up never; the shapes are equal, so nothing asserts
    linear = layer(GATE_UP)
    parts = {
        name: LoRAFactors(torch.full((2, K), value), torch.full((20, 2), -value), value)
        for name, value in (("up", 3.0), ("gate", 2.0))
    }
    linear.load_adapter(0, parts)
    assert [set(linear.slots.a[0, i, :2].unique().tolist()) for i in (0, 1)] == [{2.0}, {3.0}]
    assert [set(b[:, :2].unique().tolist()) for b in linear.slots.b[0].split(20)] == [
        {-2.0},
        {-3.0},
    ]
    assert linear.slots.scales[0].tolist() == [2.0, 3.0]


def test_slices_may_be_named_by_index() -> None:
    by_name, by_index = layer(QKV), layer(QKV)
    part = factors(4, 8, 7)
    by_name.load_adapter(0, {"k": part, "v": None})
    by_index.load_adapter(0, {1: part})
    assert same(state(by_name), state(by_index))


def test_a_slot_that_is_reused_holds_nothing_of_its_predecessor() -> None:
    # sglang #8103; the large one fills its slot, the small one has rank 2 in one slice
    small = {"k": factors(2, 8, 7)}
    used, fresh = load(layer(QKV), adapters(QKV)), layer(QKV)
    used.load_adapter(0, small)
    fresh.load_adapter(0, small)
    assert same([t[0] for t in state(used)], [t[0] for t in state(fresh)])
    used.unload(0)
    assert not any(t[0].any() for t in state(used))


@pytest.mark.parametrize("parallel", list(Parallel))
def test_an_adapter_that_is_activated_again_has_the_same_bits(parallel: Parallel) -> None:
    # vllm #20873: the cached adapter was cut in place, and cut again
    slices = (Slice("q", 16), Slice("k", 8))
    pool = adapters(slices)
    before = [(f.a.clone(), f.b.clone(), f.scale) for p in pool for f in p.values()]
    linear = load(layer(slices, parallel=parallel, tp_size=2, tp_rank=1), pool)
    first = state(linear)
    for slot in range(SLOTS):
        linear.unload(slot)
    assert same(state(load(linear, pool)), first)
    after = [(f.a, f.b, f.scale) for p in pool for f in p.values()]
    for (a0, b0, s0), (a1, b1, s1) in zip(before, after, strict=True):
        assert torch.equal(a0, a1)
        assert torch.equal(b0, b1)
        assert s0 == s1


def test_the_scale_is_applied_by_the_kernel_and_nowhere_else() -> None:
    # skyrl #2250: alpha / r folded into the durable copy, once more with every load
    part = factors(RANK, 8, 7)
    linear = layer(QKV)
    for _ in range(2):
        linear.load_adapter(0, {"v": part})
    assert torch.equal(linear.slots.b[0, 24:], part.b)
    assert torch.equal(linear.slots.a[0, 2], part.a)
    assert linear.slots.scales[0].tolist() == [0.0, 0.0, part.scale]


def test_slots_never_alias_the_adapter_and_serving_never_writes_to_the_base() -> None:
    weight, bias = base(QKV)
    linear = LoRALinear(weight, bias, slices=QKV, num_slots=SLOTS, rank=RANK)
    pool = adapters(QKV)
    load(linear, pool)
    given = {t.untyped_storage().data_ptr() for p in pool for f in p.values() for t in (f.a, f.b)}
    kept = {t.untyped_storage().data_ptr() for t in (linear.slots.a, linear.slots.b)}
    assert not given & kept
    serve(linear, randn(9, K, seed=3))
    assert same((weight, bias), base(QKV))


def test_loading_keeps_the_addresses_that_a_captured_graph_reads() -> None:
    linear = layer(QKV)
    slots = linear.slots
    tensors = (slots.a, slots.b, slots.ranks, slots.scales)
    before = [t.data_ptr() for t in tensors]
    load(linear, adapters(QKV)).unload(1)
    after = (linear.slots.a, linear.slots.b, linear.slots.ranks, linear.slots.scales)
    assert [t.data_ptr() for t in after] == before


GOOD = {"q": factors(2, 16, 7)}
BAD_PARTS = [
    (
        {"k": factors(2, 9, 7)},
        "b of k must be [8, 2] (got [9, 2])",
    ),
    (
        {"k": factors(2, 8, 7, in_features=K + 1)},
        "a of k must be [rank, 24] (got [2, 25])",
    ),
    (
        {"k": LoRAFactors(torch.ones(2, K, 1), randn(8, 2, seed=1), 1.0)},
        "a of k must be [rank, 24] (got [2, 24, 1])",
    ),
    (
        {"k": LoRAFactors(randn(2, K, seed=1), randn(8, 3, seed=1), 1.0)},
        "b of k must be [8, 2] (got [8, 3])",
    ),
    ({"k": factors(9, 8, 7)}, "rank of k must be 1 to 8 (got 9)"),
    (
        {"k": LoRAFactors(randn(2, K, seed=1), randn(8, 2, seed=1), float("inf"))},
        "scale of k must be finite in float32 (got inf)",
    ),
    (
        {"k": LoRAFactors(randn(2, K, seed=1), torch.full((8, 2), float("nan")), 1.0)},
        "b of k must have values that are finite in torch.float32",
    ),
    (
        {"k": LoRAFactors(torch.ones(2, K, dtype=torch.int64), randn(8, 2, seed=1), 1.0)},
        "a of k must be floating point (got torch.int64)",
    ),
    (
        {"k": ExpertFactors(torch.ones(1, 2, K), torch.ones(1, 8, 2), 1.0)},
        "k must have no axis of experts, it is a linear module",
    ),
    ({"kk": factors(2, 8, 7)}, "parts may name q, k, v, kv or 0 to 2 (got 'kk')"),
    ({3: factors(2, 8, 7)}, "parts may name q, k, v, kv or 0 to 2 (got 3)"),
    ({5: factors(2, 8, 7)}, "parts may name q, k, v, kv or 0 to 2 (got 5)"),
    (
        {"k": factors(2, 8, 7), "kv": factors(2, 16, 9)},
        "slice k is given twice",
    ),
]


def test_modules_without_factors_may_stand_before_those_with_factors() -> None:
    part, (first, last) = factors(2, 8, 7), (layer(QKV), layer(QKV))
    first.load_adapter(0, {"q": None, "v": None, "k": part})
    last.load_adapter(0, {"k": part})
    assert same(state(first), state(last))


@pytest.mark.parametrize("named_first", ["kv", "k"])
def test_a_module_without_factors_gives_none_of_its_slices(named_first: str) -> None:
    part, whole = {"k": factors(2, 8, 7), "v": factors(3, 8, 9)}, factors(2, 16, 8)
    for given, left_out in ((part, {"kv": None}), ({"kv": whole}, {"k": None, "v": None})):
        first, alone = (layer(QKV, fused={"kv": ("k", "v")}) for _ in range(2))
        order = sorted({**given, **left_out}.items(), key=lambda named: named[0] != named_first)
        first.load_adapter(0, dict(order))
        alone.load_adapter(0, given)
        assert same(state(first), state(alone))


@pytest.mark.parametrize(("parts", "message"), BAD_PARTS, ids=[m for _, m in BAD_PARTS])
def test_a_part_that_does_not_fit_is_refused_and_nothing_is_changed(
    parts: Adapter, message: str
) -> None:
    linear = load(layer(QKV, fused={"kv": ("k", "v")}), adapters(QKV))
    before = state(linear)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        linear.load_adapter(0, {**GOOD, **parts})
    assert same(state(linear), before)


@pytest.mark.parametrize(
    "parts",
    [factors(2, 16, 7), factors(2, 16, 7).a, [factors(2, 16, 7)]],
    ids=lambda p: type(p).__name__,
)
def test_a_bare_tensor_or_list_is_not_a_set_of_slices(parts: object) -> None:
    # vllm #51409: a tensor indexed like a list of slices yields its rows
    message = f"parts must map names to factors (got a {type(parts).__name__})"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        layer(QKV).load_adapter(0, parts)  # type: ignore[arg-type]


def test_a_value_that_overflows_in_the_layers_dtype_is_refused() -> None:
    weight, _ = base(QKV)
    linear = LoRALinear(weight.half(), slices=QKV, num_slots=SLOTS, rank=RANK)
    part = LoRAFactors(randn(2, K, seed=1), torch.full((8, 2), 7e4), 1.0)
    message = r"^b of k must have values that are finite in torch\.float16$"
    with pytest.raises(ValueError, match=message):
        linear.load_adapter(0, {"k": part})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slices": ()}, "slices must name at least one slice (got none)"),
        (
            {"slices": (Slice("q", 16), Slice("q", 16))},
            "slices must have different names (got q, q)",
        ),
        (
            {"slices": (Slice("q", 16),)},
            "weight must be [16, in_features], as the slices add up (got [32, 24])",
        ),
        ({"bias": torch.zeros(31)}, "bias must be [32] (got [31])"),
        ({"fused": {"q": ("q", "k")}}, "fused module q has the name of a slice"),
        (
            {"fused": {"qv": ("q", "v")}},
            "fused module qv must be consecutive slices of q, k, v (got q, v)",
        ),
        (
            {"fused": {"kq": ("k", "q")}},
            "fused module kq must be consecutive slices of q, k, v (got k, q)",
        ),
        (
            {"fused": {"z": ("v", "z")}},
            "fused module z must be consecutive slices of q, k, v (got v, z)",
        ),
        (
            {"fused": {"zv": ("z", "v")}},
            "fused module zv must be consecutive slices of q, k, v (got z, v)",
        ),
        ({"fused": {"no": ()}}, "fused module no must be consecutive slices of q, k, v (got )"),
        ({"rank": 513}, "rank must be 1 to 512 (got 513)"),
        ({"num_slots": 0}, "num_slots must be at least 1 (got 0)"),
    ],
)
def test_a_layer_that_cannot_be_built_is_refused(change: dict[str, object], message: str) -> None:
    weight, bias = base(QKV)
    options = {"bias": bias, "slices": QKV, "num_slots": SLOTS, "rank": RANK} | change
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LoRALinear(weight, **options)  # type: ignore[arg-type]


def test_an_input_of_the_wrong_width_is_refused() -> None:
    # also the whole input where the layer holds a part of it
    linear = layer((Slice("down", 20),), parallel=Parallel.ROW, tp_size=2)
    with pytest.raises(ValueError, match=r"^x must have 12 columns \(got 24\)$"):
        serve(linear, randn(9, K, seed=3))


def test_a_layer_may_have_hundreds_of_slices() -> None:
    slices = [Slice(f"part{number}", 1) for number in range(300)]
    layer = LoRALinear(torch.zeros(300, 4), slices=slices, num_slots=1, rank=1)
    assert len(layer.slots.slice_widths) == 300
