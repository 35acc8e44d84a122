from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import detect_machine, select_interpreter
from loragate.matrix.case import (
    Case,
    Dtype,
    ExpertMap,
    Path,
    Ranks,
    RouterWeights,
    Sharing,
    Site,
    Source,
    Write,
)
from loragate.protocol import Pool, Routes, unsupported
from loragate.subjects.vllm.alignment import align_in_torch
from loragate.subjects.vllm.moe import VllmMoEInstance, refusal
from loragate.subjects.vllm.moe_package import VllmMoEOps, load_vllm_moe
from loragate.subjects.vllm.subject import VllmSubject

select_interpreter()

BLOCK = 4


def small_case(**changes: Any) -> Case:
    axes: dict[str, Any] = {
        "site": Site.MOE_DELTA,
        "tokens": 7,
        "in_features": 24,
        "slices": (20, 20),
        "rank": 8,
        "slots": 3,
        "dtype": Dtype.FP16,
        "experts": 4,
        "top_k": 2,
        "ranks": Ranks.FULL,
    }
    return Case(**(axes | changes))


class TorchMeta:
    def __init__(self, slots: int) -> None:
        self.slots, self.mapping = slots, torch.empty(0, dtype=torch.int32)

    def prepare_tensors(self, mapping: Tensor) -> None:
        self.mapping = mapping.int()

    @property
    def ids(self) -> Tensor:
        return torch.tensor(sorted(set(self.mapping.tolist())))


class TorchWrapper:
    """The interface of the wrapper that vLLM's layers use, in plain torch; records its calls."""

    def __init__(self, max_tokens: int, batches: int, device: str, lora_config: Any) -> None:
        self.slots = lora_config.max_loras
        self.token_mapping_meta = TorchMeta(self.slots)
        self.calls: list[dict[str, Any]] = []

    def moe_lora_align_block_size(
        self,
        topk_ids: Tensor,
        num_tokens: int,
        block_size: int,
        num_experts: int,
        max_loras: int,
        adapter_enabled: Tensor,
        expert_map: Tensor | None = None,
        naive_block_assignment: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        self.calls.append({"naive": naive_block_assignment, "ids": topk_ids, "map": expert_map})
        meta = self.token_mapping_meta
        if naive_block_assignment:
            return meta.mapping, None, topk_ids.reshape(-1), None
        kernel_experts = num_experts if expert_map is None else expert_map.numel()
        capacity = topk_ids.numel() + kernel_experts * (block_size - 1)
        blocks = -(-capacity // block_size)
        # shows an operator that reads what was never written
        sorted_ids = torch.full((max_loras * capacity,), 10**6, dtype=torch.int32)
        expert_ids = torch.full((max_loras * blocks,), -1, dtype=torch.int32)
        post_pad = torch.full((max_loras,), 10**6, dtype=torch.int32)
        align_in_torch(
            topk_ids,
            meta.mapping,
            kernel_experts,
            block_size,
            max_loras,
            capacity,
            blocks,
            sorted_ids,
            expert_ids,
            post_pad,
            adapter_enabled,
            meta.ids,
            expert_map,
        )
        return meta.mapping, sorted_ids, expert_ids, post_pad

    def add_lora_fused_moe(
        self,
        y: Tensor,
        x: Tensor,
        a: tuple[Tensor, ...],
        b: tuple[Tensor, ...],
        topk_weights: Tensor,
        sorted_ids: Tensor | None,
        expert_ids: Tensor,
        num_post_pad: Tensor | None,
        max_lora_rank: int,
        top_k: int,
        shrink: Any,
        expand: Any,
        enabled: Tensor,
        mul_routed_weight: bool,
        **options: Any,
    ) -> None:
        self.calls.append(options | {"a": a, "b": b, "tiles": (shrink, expand)})
        mapping, flat = options["token_lora_mapping"], y.view(-1, y.shape[-1])
        work = _unaligned(expert_ids, mapping, top_k)
        if sorted_ids is not None and num_post_pad is not None:
            ids = [s for s in self.token_mapping_meta.ids.tolist() if s >= 0 and enabled[s]]
            work = _aligned(sorted_ids, expert_ids, num_post_pad, ids, len(flat))
        for pair, slot, expert in work:
            if slot < 0 or expert < 0 or not enabled[slot]:
                continue
            row = x[pair if mul_routed_weight else pair // top_k].float()
            weight = float(topk_weights.flatten()[pair]) if mul_routed_weight else 1.0
            factors = zip(a, b, strict=True)
            parts = [weight * (q[slot, expert].float() @ (p[slot, expert].float() @ row))
                     for p, q in factors]  # fmt: skip
            delta = torch.cat(parts).to(y.dtype)
            flat[pair] = flat[pair] + delta if options["add_inputs"] else delta


def _unaligned(experts: Tensor, mapping: Tensor, top_k: int) -> Iterator[tuple[int, int, int]]:
    for pair, expert in enumerate(experts.flatten().tolist()):
        yield pair, int(mapping[pair // top_k]), expert


def _aligned(
    sorted_ids: Tensor, experts: Tensor, post_pad: Tensor, slots: list[int], pairs: int
) -> Iterator[tuple[int, int, int]]:
    for slot in slots:
        for place in range(int(post_pad[slot])):
            pair = int(sorted_ids[slot, place])
            if pair < pairs:
                yield pair, slot, int(experts[slot, place // BLOCK])


def substitute_ops() -> VllmMoEOps:
    def tiles(**launch: Any) -> dict[str, Any]:
        return {"BLOCK_SIZE_M": BLOCK, "launch": launch}

    def never(*arguments: object) -> None:
        raise AssertionError("the operators are reached through the wrapper")

    return VllmMoEOps(
        version="0", wrapper=TorchWrapper, tiles=tiles, fused_moe_lora=never, align=never
    )


def open_instance(case: Case) -> VllmMoEInstance:
    return VllmMoEInstance.of_case(substitute_ops(), case, "cpu")


def wrapper_of(instance: VllmMoEInstance) -> TorchWrapper:
    wrapper = instance._wrapper
    assert isinstance(wrapper, TorchWrapper)
    return wrapper


def draw(case: Case) -> tuple[Pool, Tensor, Tensor, Tensor, Routes]:
    """Pool, x, slots, out, routes."""
    generator = torch.Generator().manual_seed(case.tokens + case.rank)
    dtype = torch.float16 if case.dtype is Dtype.FP16 else torch.bfloat16

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    a_experts = 1 if case.sharing is Sharing.SHARED_A else case.experts
    b_experts = 1 if case.sharing is Sharing.SHARED_B else case.experts
    slices = len(case.slices)
    pool = Pool(
        normal(case.slots, a_experts, slices, case.rank, case.in_features) / case.in_features**0.5,
        tuple(normal(case.slots, b_experts, w, case.rank) / case.rank**0.5 for w in case.slices),
        ((case.rank,) * slices,) * case.slots,
        tuple(tuple(0.5 + 0.3 * s + part for part in range(slices)) for s in range(case.slots)),
    )
    slots = torch.tensor([(t % (case.slots + 1)) - 1 for t in range(case.tokens)]).int()
    ids = [torch.randperm(case.global_experts, generator=generator) for _ in range(case.tokens)]
    topk = torch.stack(ids)[:, : case.top_k].int()
    expert_map = None
    if case.expert_map is ExpertMap.PARALLEL:
        topk[1, 0] = -1
        expert_map = torch.full((case.global_experts,), -1, dtype=torch.int32)
        expert_map[1::2] = torch.arange(case.experts).int()
    weights = torch.rand(case.tokens, case.top_k, generator=generator) + 0.5
    routes = Routes(topk, expert_map, None if case.router is RouterWeights.NONE else weights)
    x, out = normal(case.x_rows, case.in_features), normal(case.out_rows, case.out_features)
    return pool, x, slots, out, routes


def golden(case: Case, pool: Pool, x: Tensor, slots: Tensor, out: Tensor, routes: Routes) -> Tensor:
    result = out.double()
    for pair, expert in enumerate(routes.topk_ids.flatten().tolist()):
        slot = int(slots[pair // case.top_k])
        if expert >= 0 and routes.expert_map is not None:
            expert = int(routes.expert_map[expert])
        if slot < 0 or expert < 0:
            continue
        row = x[pair if case.source is Source.PAIR else pair // case.top_k].double()
        weight = 1.0 if routes.weights is None else float(routes.weights.flatten()[pair])
        parts = []
        for part, b in enumerate(pool.b):
            shrunk = pool.a[slot, min(expert, pool.a.shape[1] - 1), part].double() @ row
            factor = b[slot, min(expert, b.shape[1] - 1)].double()
            parts.append(weight * pool.scales[slot][part] * (factor @ shrunk))
        delta = torch.cat(parts)
        result[pair] = result[pair] + delta if case.write is Write.ADD else delta
    return result


SHAPES: dict[str, dict[str, Any]] = {
    "w13": {},
    "w2": {"source": Source.PAIR, "router": RouterWeights.OUTPUT, "slices": (33,)},
    "w2 without weights": {"source": Source.PAIR},
    "expert map": {"expert_map": ExpertMap.PARALLEL},
    "shared A": {"sharing": Sharing.SHARED_A},
    "shared B": {"sharing": Sharing.SHARED_B, "source": Source.PAIR},
    "store": {"write": Write.STORE},
}


def runs(path: Path, name: str) -> bool:
    return refusal(small_case(path=path, **SHAPES[name])) is None


RUNNING = [(path, name) for path in Path for name in SHAPES if runs(path, name)]


@pytest.mark.parametrize(("path", "name"), RUNNING)
def test_every_path_gives_the_delta_of_the_pool(path: Path, name: str) -> None:
    case = small_case(path=path, **SHAPES[name])
    pool, x, slots, out, routes = draw(case)
    instance = open_instance(case)
    for slot in range(case.slots):
        instance.load(slot, pool)
    want = golden(case, pool, x, slots, out, routes)
    instance.prepare(slots)
    got = instance.apply(x, out, routes)
    assert got.data_ptr() == out.data_ptr()
    torch.testing.assert_close(got.double(), want, atol=0.02, rtol=0)


@pytest.mark.parametrize("path", [Path.ONE_SHOT, Path.SMALL_BATCH, Path.TWO_KERNEL])
def test_a_path_is_forced_by_alignment_and_sharding(path: Path) -> None:
    case = small_case(path=path)
    _, x, slots, out, routes = draw(case)
    instance = open_instance(case)
    instance.prepare(slots)
    instance.apply(x, out, routes)
    aligned, launched = wrapper_of(instance).calls
    assert aligned["naive"] is (path is Path.SMALL_BATCH)
    assert launched["fully_sharded"] is (path is Path.TWO_KERNEL)


def test_the_plan_aligns_unless_pairs_are_few_and_all_experts_are_here() -> None:
    def aligns(**changes: Any) -> bool:
        case = small_case(experts=56, slots=2, **changes)
        slots, routes = draw(case)[2], draw(case)[4]
        instance = open_instance(case)
        instance.prepare(slots)
        return instance.assign(routes).sorted_ids is not None

    assert not aligns(tokens=7)
    assert aligns(tokens=8)
    assert aligns(tokens=7, expert_map=ExpertMap.PARALLEL)


def test_a_pair_without_expert_is_passed_as_one_whose_expert_is_elsewhere() -> None:
    case = small_case(path=Path.ONE_SHOT, expert_map=ExpertMap.PARALLEL)
    _, _, slots, _, routes = draw(case)
    instance = open_instance(case)
    instance.prepare(slots)
    instance.assign(routes)
    call = wrapper_of(instance).calls[0]
    assert routes.expert_map is not None
    assert call["ids"].dtype == torch.int32
    assert call["ids"][1, 0] == case.global_experts
    assert call["map"].tolist() == [*routes.expert_map.tolist(), -1]


def test_shared_factors_are_kept_once_and_expanded_without_a_copy() -> None:
    case = small_case(sharing=Sharing.SHARED_A)
    pool, x, slots, out, routes = draw(case)
    instance = open_instance(case)
    instance.load(1, pool)
    instance.prepare(slots)
    instance.apply(x, out, routes)
    launched = wrapper_of(instance).calls[-1]
    assert instance.a[0].shape[1] == 1
    assert launched["a"][0].shape[1] == case.experts
    assert launched["a"][0].stride(1) == 0
    assert launched["a"][0].data_ptr() == instance.a[0].data_ptr()


@pytest.mark.parametrize("write", Write)
def test_rows_of_an_emptied_slot_keep_their_bits(write: Write) -> None:
    case = small_case(path=Path.ONE_SHOT, write=write)
    pool, x, slots, out, routes = draw(case)
    instance, before = open_instance(case), out.clone()
    for slot in range(case.slots):
        instance.load(slot, pool)
    instance.unload(2)
    instance.prepare(slots)
    instance.apply(x, out, routes)
    rows = (slots == 2).repeat_interleave(case.top_k)
    assert torch.equal(out[rows], before[rows])
    assert not torch.equal(out[~rows], before[~rows])
    assert not any(weight[2].any() for weight in (*instance.a, *instance.b))


def test_a_smaller_adapter_leaves_zeros_where_a_larger_one_was() -> None:
    case = small_case()
    pool, *_ = draw(case)
    instance = open_instance(case)
    instance.load(0, pool)
    instance.load(0, replace(pool, ranks=((3, 3),) * case.slots))
    assert all(not a[0, :, 3:].any() for a in instance.a)
    assert all(not b[0, :, :, 3:].any() for b in instance.b)


def test_another_path_works_on_the_same_weights_and_leaves_the_first_as_it_is() -> None:
    instance = open_instance(small_case(path=Path.ONE_SHOT))
    other = instance.on_path(Path.SMALL_BATCH)
    assert (instance.path, other.path) == (Path.ONE_SHOT, Path.SMALL_BATCH)
    assert other.a[0].data_ptr() == instance.a[0].data_ptr()
    assert wrapper_of(other) is wrapper_of(instance)


def test_tiles_are_looked_up_by_the_shapes_of_the_base_layer() -> None:
    w13 = small_case(slices=(20, 20), in_features=24)
    w2 = small_case(slices=(24,), in_features=20, source=Source.PAIR)
    for case, layer in ((w13, "w13"), (w2, "w2")):
        _, x, slots, out, routes = draw(case)
        instance = open_instance(case)
        instance.prepare(slots)
        instance.apply(x, out, routes)
        shrink, expand = wrapper_of(instance).calls[-1]["tiles"]
        assert shrink["launch"]["op_type"] == f"fused_moe_lora_{layer}_shrink"
        assert expand["launch"]["op_type"] == f"fused_moe_lora_{layer}_expand"
        assert shrink["launch"]["w1_shape"] == (4, 40, 24)
        assert shrink["launch"]["w2_shape"] == (4, 24, 20)
        assert shrink["launch"]["M"] == case.tokens


REFUSED: dict[str, dict[str, Any]] = {
    "slices of different widths": {"slices": (20, 16)},
    "rank 129 is above the limit of 128": {"rank": 129},
    "asserts that it adds": {"path": Path.TWO_KERNEL, "write": Write.STORE},
    "storing writes zeros": {"write": Write.STORE, "ranks": Ranks.MIXED},
    "align whatever has an expert map": {
        "path": Path.SMALL_BATCH,
        "expert_map": ExpertMap.PARALLEL,
    },
    "a row of x each": {"router": RouterWeights.OUTPUT},
    "1000 experts are above the limit of 992": {"experts": 1000},
    "993 experts are above the limit of 992": {"experts": 496, "expert_map": ExpertMap.PARALLEL},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_an_unsupported_case_is_a_skip_with_the_reason(reason: str) -> None:
    have = VllmSubject.describe(interpreted=True, batch_invariant=False)
    assert unsupported(small_case(), have) is None
    assert reason in str(unsupported(small_case(**REFUSED[reason]), have))


def test_only_the_two_kernel_path_takes_any_rank_and_only_alignment_has_few_experts() -> None:
    assert refusal(small_case(rank=512, path=Path.TWO_KERNEL)) is None
    assert refusal(small_case(rank=128)) is None
    assert refusal(small_case(experts=1024, path=Path.SMALL_BATCH)) is None
    assert refusal(small_case(experts=992)) is None
    assert refusal(small_case(router=RouterWeights.OUTPUT, top_k=1)) is None


def test_a_package_without_moe_lora_still_runs_dense_cases() -> None:
    have = VllmSubject.describe(True, False, missing={Site.MOE_DELTA: "vLLM 0: no aiohttp"})
    assert unsupported(small_case(), have) == "vLLM 0: no aiohttp"
    dense = Case(site=Site.DENSE_DELTA, tokens=1, in_features=8, slices=(8, 4), rank=8, slots=1,
                 dtype=Dtype.FP16)  # fmt: skip
    assert unsupported(dense, have) is None


@pytest.fixture(scope="module")
def installed() -> VllmMoEOps:
    ops = load_vllm_moe(detect_machine())
    if isinstance(ops, str):
        pytest.skip(ops)
    return ops


@pytest.mark.parametrize(("path", "name"), RUNNING)
def test_the_installed_vllm_gives_the_delta_of_the_pool(
    installed: VllmMoEOps, path: Path, name: str
) -> None:
    device = detect_machine().device
    case = small_case(path=path, dtype=Dtype.BF16, **SHAPES[name])
    pool, x, slots, out, routes = draw(case)
    want = golden(case, pool, x, slots, out, routes)
    instance = VllmMoEInstance.of_case(installed, case, device)
    for slot in range(case.slots):
        instance.load(slot, pool)
    instance.prepare(slots)
    got = instance.apply(x.to(device), out.to(device), on(device, routes))
    torch.testing.assert_close(got.cpu().double(), want, atol=0.1, rtol=0)


def on(device: str, routes: Routes) -> Routes:
    parts = (routes.topk_ids, routes.expert_map, routes.weights)
    ids, expert_map, weights = (None if part is None else part.to(device) for part in parts)
    assert ids is not None
    return Routes(ids, expert_map, weights)


@pytest.mark.parametrize("tokens", [1, 7, 8, 20])
def test_the_plan_aligns_where_the_layers_of_the_installed_vllm_do(
    installed: VllmMoEOps, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = detect_machine().device
    case = small_case(tokens=tokens, experts=56, slots=2)
    _, x, slots, out, routes = draw(case)
    x, out, routes = x.to(device), out.to(device), on(device, routes)
    instance = VllmMoEInstance.of_case(installed, case, device)
    instance.prepare(slots)
    chosen: list[tuple[bool, int]] = []
    align = instance._wrapper.moe_lora_align_block_size

    def watched(*arguments: Any, naive_block_assignment: bool = False, **options: Any) -> Any:
        chosen.append((naive_block_assignment, arguments[2]))
        return align(*arguments, naive_block_assignment=naive_block_assignment, **options)

    monkeypatch.setattr(instance._wrapper, "moe_lora_align_block_size", watched)
    instance.apply(x, out, routes)
    w1, w2 = (torch.empty(shape, device="meta") for shape in instance.shapes.base_shapes)
    instance._wrapper.add_lora_w13(
        out.view(tokens, case.top_k, -1), x, tuple(instance.a), tuple(instance.b),
        routes.topk_ids, instance._ones, None, w1, w2, tokens, case.top_k, case.slots,
        instance._enabled, case.experts, case.top_k, len(case.slices), False, False,
    )  # fmt: skip
    ours, theirs = chosen
    assert ours == theirs
