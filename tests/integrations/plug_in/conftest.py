"""A small stand-in for the parts of vLLM that the plug-in meets, with vLLM's names and in-place
behaviour. What does not need the stand-in's layers also runs with vLLM's own wrapper, where it is
installed. Kernels run in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ["TRITON_INTERPRET"] = "1"

from ...watched import watched_kernels  # noqa: F401

SLOTS, RANK, ROWS = 3, 4, 40


@pytest.fixture
def stacked() -> Collection[tuple[str, str]]:
    from loragate.subjects.vllm_lorakernels.first_slices import FIRST_SLICES

    # of a packed layer the kernels get the first slice, and read the others behind it
    return set(FIRST_SLICES)


@dataclass(frozen=True)
class Mapping:
    """Ids of adapters by row and by sample; 0 is none."""

    index_mapping: tuple[int, ...]
    prompt_mapping: tuple[int, ...]
    is_prefill: bool = False


class StandInWrapper:
    """What vLLM's wrapper keeps of a step, and a log of the calls that its own kernels get."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: str, **kwargs: Any
    ) -> None:
        self.lora_config = kwargs["lora_config"]
        self._rows = torch.full((max_num_batched_tokens,), 77)
        self._samples = torch.full((max_num_batched_tokens,), 77)
        self._lengths = [0, 0]
        self.token_mapping_meta = SimpleNamespace(no_lora_flag_cpu=torch.tensor([False]))
        self.prompt_mapping_meta = SimpleNamespace(no_lora_flag_cpu=torch.tensor([False]))
        self.own_calls: list[str] = []
        self.own_arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int
    ) -> None:
        # assigned anew in each step; the tables are written in place
        self.is_prefill = mapping.is_prefill
        parts = (
            (self._rows, mapping.index_mapping, self.token_mapping_meta),
            (self._samples, mapping.prompt_mapping, self.prompt_mapping_meta),
        )
        for number, (table, ids, meta) in enumerate(parts):
            slots = [lora_index_to_id.index(i) if i > 0 else -1 for i in ids]
            table[: len(slots)] = torch.tensor(slots, dtype=torch.int64)
            self._lengths[number] = len(slots)
            meta.no_lora_flag_cpu[0] = all(slot < 0 for slot in slots)

    @property
    def token_lora_indices(self) -> Tensor:
        return self._rows[: self._lengths[0]]

    @property
    def sampler_indices(self) -> Tensor:
        return self._samples[: self._lengths[1]]

    def add_lora_linear(self, *args: Any, **kwargs: Any) -> None:
        self.own_calls.append("linear")
        self.own_arguments.append((args, kwargs))

    def add_lora_logits(self, *args: Any, **kwargs: Any) -> None:
        self.own_calls.append("logits")
        self.own_arguments.append((args, kwargs))


@pytest.fixture(params=["stand-in", "vllm"])
def base(request: pytest.FixtureRequest) -> type:
    """The class behind the plug-in's methods."""
    if request.param == "stand-in":
        return StandInWrapper
    return vllm_layers().wrapper  # type: ignore[no-any-return]


@pytest.fixture
def installed_layers() -> Any:
    """vLLM's own layers; the test is skipped where they cannot be imported."""
    return vllm_layers()


def vllm_layers() -> Any:
    from loragate.core.machine import Machine, select_interpreter
    from loragate.subjects.vllm.layer_package import load_vllm_layers

    select_interpreter()
    layers = load_vllm_layers(Machine("cpu", "test", None, 1, 0))
    if isinstance(layers, str):
        pytest.skip(layers)
    return layers


class Server:
    """A wrapper with the plug-in's methods, and the mapping of ids to slots."""

    def __init__(self, base: type, *, slots: int = SLOTS, rows: int = ROWS, rank: int = RANK):
        from lorakernels.integrations.vllm.methods import LoraKernelsMethods

        config = SimpleNamespace(max_loras=slots, max_lora_rank=rank, specialize_active_lora=False)
        kind: Any = type("Wrapper", (LoraKernelsMethods, base), {})
        self.wrapper: Any = kind(rows, rows, "cpu", lora_config=config)
        # vLLM gives ids in any order
        self.ids: list[int | None] = [7 + slot for slot in reversed(range(slots))]

    def step(
        self,
        slots: Sequence[int],
        samples: Sequence[int] | None = None,
        *,
        is_prefill: bool = False,
    ) -> None:
        """Install the mapping of a step, of slots."""
        rows, prompts = (
            tuple(0 if slot < 0 else self.ids[slot] for slot in part)
            for part in (slots, slots if samples is None else samples)
        )
        mapping = Mapping(rows, prompts, is_prefill)  # type: ignore[arg-type]
        self.wrapper.update_metadata(mapping, self.ids, len(self.ids) + 1, 64)


@pytest.fixture
def plain() -> Server:
    """A server with the stand-in."""
    return Server(StandInWrapper)


@pytest.fixture
def make_server(base: type) -> Callable[..., Server]:
    return lambda **sizes: Server(base, **sizes)


@pytest.fixture
def server(make_server: Callable[..., Server]) -> Server:
    return make_server()


@pytest.fixture(autouse=True)
def undeclared() -> Iterator[None]:
    """No test sees what another one declared or counted."""
    from lorakernels.integrations.vllm.declaration import DECLARATION
    from lorakernels.integrations.vllm.launches import reset_launch_counts

    DECLARATION.mapping_installed()
    reset_launch_counts()
    yield
    DECLARATION.mapping_installed()


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class StandInLinear:
    """A linear layer of vLLM with adapters, whose slices are loaded in place."""

    def __init__(self, widths: Sequence[int], k: int = 24, *, slots: int = SLOTS) -> None:
        self.output_slices, self.k = tuple(widths), k
        self.weight = randn(sum(widths), k, seed=1)
        self.lora_a_stacked = tuple(torch.zeros(slots, 1, RANK, k) for _ in widths)
        self.lora_b_stacked = tuple(torch.zeros(slots, 1, width, RANK) for width in widths)

    def set_mapping(self, punica_wrapper: Any) -> None:
        self.punica_wrapper = punica_wrapper

    def set_lora(self, slot: int, a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        self.reset_lora(slot)
        for stack, part in zip((*self.lora_a_stacked, *self.lora_b_stacked), (*a, *b), strict=True):
            stack[slot, 0, : part.shape[0], : part.shape[1]].copy_(part)

    def reset_lora(self, slot: int) -> None:
        for stack in (*self.lora_a_stacked, *self.lora_b_stacked):
            stack[slot] = 0

    def __call__(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T
        self.punica_wrapper.add_lora_linear(
            out, x, self.lora_a_stacked, self.lora_b_stacked, 1.0, self.output_slices
        )
        return out


def named(name: str, layer: type) -> type:
    """The class under the name of one of vLLM's."""
    return type(name, (layer,), {})


class Linear:
    """An adopted layer, and what plain torch makes of it."""

    def __init__(self, server: Server, widths: Sequence[int] = (20, 12)) -> None:
        from lorakernels.integrations.vllm.adoption import adopt

        self.layer: Any = named("MergedColumnParallelLinearWithLoRA", StandInLinear)(widths)
        self.layer.set_mapping(adopt(self.layer, server.wrapper))
        self.resident: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def load(self, slot: int, seed: int, rank: int = RANK) -> None:
        layer = self.layer
        a = [randn(rank, layer.k, seed=seed + i) for i, _ in enumerate(layer.output_slices)]
        b = [randn(width, rank, seed=seed + 50 + i) for i, width in enumerate(layer.output_slices)]
        layer.set_lora(slot, a, b)
        self.resident[slot] = (a, b)

    def evict(self, slot: int) -> None:
        self.layer.reset_lora(slot)
        del self.resident[slot]

    def check(self, slots: Sequence[int], *, rows: int | None = None, seed: int = 5) -> None:
        """The layer gives each row its own adapter, and rows of padding none."""
        x = randn(len(slots) if rows is None else rows, self.layer.k, seed=seed)
        torch.testing.assert_close(self.layer(x), self.wanted(x, slots), rtol=1e-4, atol=1e-4)

    def wanted(self, x: Tensor, slots: Sequence[int]) -> Tensor:
        out = x @ self.layer.weight.T
        for row, slot in enumerate(slots):
            if slot in self.resident:
                a, b = self.resident[slot]
                out[row] += torch.cat([q @ (p @ x[row]) for p, q in zip(a, b, strict=True)])
        return out


@pytest.fixture
def make_linear() -> type[Linear]:
    return Linear


class StandInMixin:
    """How vLLM's experts hand their adapters to the wrapper."""

    def apply_w13_lora(
        self,
        context: Any,
        *,
        y: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: None,
        w1: None,
        w2: None,
        num_tokens: int,
        top_k_num: int,
        add_inputs: bool = True,
        swap_w13_slices: bool = False,
    ) -> Any:
        a, b = context.w13_lora_a_stacked, context.w13_lora_b_stacked
        if context.enable_moe_shared_loras:
            a = tuple(part.expand(-1, context.local_num_experts, -1, -1) for part in a)
        if swap_w13_slices:
            a, b = a[::-1], b[::-1]
        return context.punica_wrapper.add_lora_w13(
            *(y, x, a, b, topk_ids, topk_weights, expert_map, w1, w2, num_tokens, top_k_num),
            *(context.max_loras, context.adapter_enabled, context.local_num_experts),
            *(context.top_k, context.w13_num_slices, context.fully_sharded),
            context.use_tuned_config,
            add_inputs=add_inputs,
            token_lora_mapping=context.local_token_lora_mapping,
        )

    def apply_w2_lora(
        self,
        context: Any,
        *,
        y: Tensor,
        x: Tensor,
        topk_weights: Tensor,
        sorted_token_ids_lora: Any,
        expert_ids_lora: Any,
        num_tokens_post_padded_lora: Any,
        token_lora_mapping: Any,
        num_tokens: int,
        w1: None,
        w2: None,
        top_k_num: int,
        add_inputs: bool = True,
    ) -> None:
        b = context.w2_lora_b_stacked
        if context.enable_moe_shared_loras:
            b = tuple(part.expand(-1, context.local_num_experts, -1, -1) for part in b)
        context.punica_wrapper.add_lora_w2(
            *(y, x, context.w2_lora_a_stacked, b, topk_weights, sorted_token_ids_lora),
            *(expert_ids_lora, num_tokens_post_padded_lora, token_lora_mapping, num_tokens),
            *(w1, w2, top_k_num, context.max_loras, context.adapter_enabled, context.top_k),
            *(context.fully_sharded, context.tp_rank, context.use_tuned_config),
            add_inputs=add_inputs,
        )


# different from each other and from RANK
EXPERTS, TOP_K, HIDDEN, INTER = 5, 2, 24, 16
# what the outputs hold before a delta is added or written
HELD = 3.0


class StandInExperts:
    """A MoE layer of vLLM with adapters: its stacks, the lists of each adapter's and expert's
    part, and the context that its experts get when a wrapper is set."""

    def __init__(self, slices: int = 2, *, shared: bool = False, slots: int = SLOTS) -> None:
        inter = INTER * (1 if slices == 2 else 2)
        outer = 1 if shared else EXPERTS
        self.fully_sharded, self.use_ep, self.shared, self.slots = False, False, shared, slots
        self.moe_config = SimpleNamespace(
            experts_per_token=TOP_K, moe_parallel_config=SimpleNamespace(dp_size=1)
        )
        self.local_num_experts = EXPERTS

        def stacks(count: int, *shape: int) -> tuple[Tensor, ...]:
            return tuple(torch.zeros(slots, *shape) for _ in range(count))

        self.w13_lora_a_stacked = stacks(slices, outer, RANK, HIDDEN)
        self.w13_lora_b_stacked = stacks(slices, EXPERTS, inter, RANK)
        self.w2_lora_a_stacked = stacks(1, EXPERTS, RANK, INTER)
        self.w2_lora_b_stacked = stacks(1, outer, HIDDEN, RANK)
        self.lora_a_stacked: list[Tensor] = []
        self.lora_b_stacked: list[Tensor] = []
        for slot in range(slots):
            for expert in range(EXPERTS):
                place = 0 if shared else expert
                for a, b in zip(self.w13_lora_a_stacked, self.w13_lora_b_stacked, strict=True):
                    self.lora_a_stacked.append(a[slot][place])
                    self.lora_b_stacked.append(b[slot][expert])
                self.lora_a_stacked.append(self.w2_lora_a_stacked[0][slot][expert])
                self.lora_b_stacked.append(self.w2_lora_b_stacked[0][slot][place])

    @property
    def stacks(self) -> list[Tensor]:
        return [
            *(*self.w13_lora_a_stacked, *self.w13_lora_b_stacked),
            *(*self.w2_lora_a_stacked, *self.w2_lora_b_stacked),
        ]

    def set_mapping(self, punica_wrapper: Any) -> None:
        self.context = SimpleNamespace(
            w13_lora_a_stacked=self.w13_lora_a_stacked,
            w13_lora_b_stacked=self.w13_lora_b_stacked,
            w2_lora_a_stacked=self.w2_lora_a_stacked,
            w2_lora_b_stacked=self.w2_lora_b_stacked,
            adapter_enabled=None,
            max_loras=self.slots,
            top_k=TOP_K,
            w13_num_slices=len(self.w13_lora_a_stacked),
            fully_sharded=False,
            tp_rank=0,
            local_num_experts=EXPERTS,
            punica_wrapper=punica_wrapper,
            use_tuned_config=False,
            enable_moe_shared_loras=self.shared,
            local_token_lora_mapping=None,
        )


@pytest.fixture(params=["stand-in", "vllm"])
def mixin(request: pytest.FixtureRequest) -> Any:
    """How experts call the wrapper."""
    if request.param == "stand-in":
        return StandInMixin()
    vllm_layers()
    import importlib

    module: Any = importlib.import_module(
        "vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin"
    )
    own = module.LoRAExpertsMixin()
    # of 0.33: the activation decides how gate and up lie
    own.moe_config = SimpleNamespace(activation=None)
    return own


class Experts:
    """An adopted layer with random adapters, and what plain torch makes of it."""

    def __init__(self, server: Server, mixin: Any, slices: int = 2, *, shared: bool = False):
        kind = named("FusedMoEWithLoRA" if slices == 2 else "FusedMoE3DWithLoRA", StandInExperts)
        self.layer: Any = kind(slices, shared=shared)
        from lorakernels.integrations.vllm.adoption import adopt

        self.layer.set_mapping(adopt(self.layer, server.wrapper))
        self.mixin, self.server = mixin, server
        for number, stack in enumerate(self.layer.stacks):
            # in place, as vLLM loads
            for slot in range(len(stack)):
                stack[slot].copy_(randn(*stack[slot].shape, seed=10 * number + slot))

    def routes(self, rows: int, top_k: int = TOP_K) -> tuple[Tensor, Tensor]:
        ids = randn(rows, EXPERTS, seed=3).argsort(1)[:, :top_k].int().contiguous()
        return ids, randn(rows, top_k, seed=4).abs()

    def apply(
        self,
        slots: tuple[int, ...],
        *,
        rows: int | None = None,
        ids: Tensor | None = None,
        swaps: bool = False,
        adds: bool = True,
    ) -> None:
        """Both products, compared with a plain loop over pairs."""
        count = len(slots) if rows is None else rows
        drawn, weights = self.routes(count)
        ids = drawn if ids is None else ids
        top_k = ids.shape[1]
        x, y = randn(count, HIDDEN, seed=5), torch.full((count, top_k, 2 * INTER), HELD)
        act, z = randn(count * top_k, INTER, seed=6), torch.full((count, top_k, HIDDEN), HELD)
        wanted_y, wanted_z = y.clone(), z.clone()
        context, shared = self.layer.context, {"w1": None, "w2": None, "num_tokens": count}
        shared |= {"topk_weights": weights, "top_k_num": top_k, "add_inputs": adds}
        state = self.mixin.apply_w13_lora(
            context, y=y, x=x, topk_ids=ids, expert_map=None, swap_w13_slices=swaps, **shared
        )
        names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
        handed_on = {f"{name}_lora": part for name, part in zip(names, state, strict=False)}
        self.mixin.apply_w2_lora(
            context, y=z, x=act, token_lora_mapping=state[3], **handed_on, **shared
        )
        for row, slot in enumerate((*slots, *[-1] * count)[:count]):
            if slot < 0 and not adds:
                # the server clears what has no adapter, before or after
                for wanted, found in ((wanted_y, y), (wanted_z, z)):
                    assert found[row].unique().tolist() in ([0.0], [HELD])
                    wanted[row] = found[row]
            for choice, expert in enumerate(ids[row].tolist() if slot >= 0 else ()):
                w13, w2 = self._delta(slot, expert, x[row], act[row * top_k + choice], swaps)
                wanted_y[row, choice] = w13 + HELD * adds
                wanted_z[row, choice] = weights[row, choice] * w2 + HELD * adds
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
def make_experts() -> type[Experts]:
    return Experts


@pytest.fixture
def kit() -> Any:
    """Stand-ins of layers, to be adopted by a test itself."""

    def linear(name: str, widths: Sequence[int] = (8, 4)) -> Any:
        return named(name, StandInLinear)(widths)

    def experts(name: str = "FusedMoEWithLoRA", slices: int = 2, **options: Any) -> Any:
        return named(name, StandInExperts)(slices, **options)

    return SimpleNamespace(linear=linear, experts=experts, wrapper=StandInWrapper, server=Server)
