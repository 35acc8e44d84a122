"""Subject `vllm`: the LoRA kernels of the installed vLLM, called as its layers call them, and the
layers themselves.

This module does dense_delta, moe.py does moe_delta, lora_linear.py and moe_layer.py do the sites of
the same names. At dense_delta A and B are lists with one stacked tensor for each slice, the shrink
output is a fresh fp32 tensor in each call, the scale is folded into B when an adapter is loaded,
and the grid covers every slot and the base rows. This module only translates from the harness's
interface.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.matrix.case import (
    MOE_SITES,
    Bias,
    Case,
    Dtype,
    Execution,
    Layout,
    Parallel,
    Path,
    Site,
    Streams,
)
from loragate.protocol import AnyInstance, BaseExperts, BaseLayer, Capabilities, Pool
from loragate.subjects.vllm import lora_linear, moe, moe_layer
from loragate.subjects.vllm.engine_arguments import ENGINE_SUPPORTS, NEEDS_GPU, engine_refusal
from loragate.subjects.vllm.layer_package import load_vllm_layers
from loragate.subjects.vllm.layer_tables import POINTER_TABLES
from loragate.subjects.vllm.lora_linear import VllmLoRALinear, host_tensors
from loragate.subjects.vllm.moe import VllmMoEInstance
from loragate.subjects.vllm.moe_layer import VllmMoELayer
from loragate.subjects.vllm.moe_package import load_vllm_moe
from loragate.subjects.vllm.package import VllmOps, fold_scale, installed_version, load_vllm

# the largest value that vLLM's option for the rank of the buffers accepts
MAX_RANK = 512
_TORCH_DTYPES = {Dtype.FP16: torch.float16, Dtype.BF16: torch.bfloat16}
_REFUSALS: Mapping[Site, Callable[[Case], str | None]] = MappingProxyType(
    {
        Site.DENSE_DELTA: lambda case: None,
        Site.LORA_LINEAR: lora_linear.refusal,
        Site.MOE_DELTA: moe.refusal,
        Site.MOE_LAYER: moe_layer.refusal,
        Site.ENGINE: engine_refusal,
    }
)
_ALL_THERE: Mapping[Site, str] = MappingProxyType({})


class VllmInstance:
    """Stacked weights of one layer and the kernel metadata of one wrapper.

    `a[slice]` is [slots, 1, rank, in_features], `b[slice]` is [slots, 1, slice width, rank].
    """

    def __init__(
        self,
        ops: VllmOps,
        *,
        num_slots: int,
        slices: tuple[int, ...],
        in_features: int,
        rank: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        def stacked(*shape: int) -> Tensor:
            return torch.zeros(num_slots, 1, *shape, dtype=dtype, device=device)

        self.a = [stacked(rank, in_features) for _ in slices]
        self.b = [stacked(width, rank) for width in slices]
        # one process opens many pools in turn: what was stored for an address of an earlier pool
        # must not be used for this one
        ops.forget(self.a, self.b)
        # otherwise the tables would keep the weights of this pool alive as long as the process
        weakref.finalize(self, ops.forget, self.a, self.b).atexit = False
        self._ops = ops
        self._meta = ops.kernel_meta.make(num_slots, max_tokens, device)
        self._device = device

    def load(self, slot: int, pool: Pool) -> None:
        self.unload(slot)
        parts = zip(pool.ranks[slot], pool.scales[slot], self.a, self.b, strict=True)
        for index, (rank, scale, a, b) in enumerate(parts):
            a[slot, 0, :rank].copy_(pool.a[slot, index, :rank])
            b[slot, 0, :, :rank].copy_(fold_scale(pool.b[index][slot, :, :rank], scale))

    def unload(self, slot: int) -> None:
        for weight in (*self.a, *self.b):
            weight[slot].zero_()

    def prepare(self, token_slots: Tensor) -> None:
        # vLLM's layers pass int64 on the device
        self._meta.prepare_tensors(token_slots.to(self._device, torch.int64))

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return self._run(x, out, add_inputs=True)

    def store(self, x: Tensor, out: Tensor) -> Tensor:
        """The delta alone, into zeros, as a layer with a second stream computes it. Rows without
        an adapter are not written."""
        return self._run(x, out, add_inputs=False)

    def _run(self, x: Tensor, out: Tensor, *, add_inputs: bool) -> Tensor:
        tokens, rank = x.shape[0], self.a[0].shape[2]
        shrunk = torch.empty(len(self.a), tokens, rank, dtype=torch.float32, device=x.device)
        meta = self._meta.meta_args(tokens, False)
        self._ops.lora_shrink(x, self.a, shrunk, *meta, 1.0)
        self._ops.lora_expand(shrunk, self.b, out, *meta, offset_start=0, add_inputs=add_inputs)
        return out


class VllmSubject:
    name = "vllm"

    def version(self) -> str:
        return installed_version() or "not installed"

    def capabilities(self, machine: Machine) -> Capabilities | str:
        ops = load_vllm(machine)
        if isinstance(ops, str):
            return ops
        layers = load_vllm_layers(machine)
        on_gpu = "its MoE layer calls operators that exist for CUDA only"
        loaded = {
            Site.MOE_DELTA: load_vllm_moe(machine),
            Site.LORA_LINEAR: layers,
            Site.MOE_LAYER: on_gpu if machine.interpreted else layers,
            Site.ENGINE: NEEDS_GPU if machine.interpreted else None,
        }
        missing = {site: found for site, found in loaded.items() if isinstance(found, str)}
        return self.describe(machine.interpreted, ops.batch_invariant, missing=missing)

    @staticmethod
    def describe(
        interpreted: bool, batch_invariant: bool, *, missing: Mapping[Site, str] = _ALL_THERE
    ) -> Capabilities:
        """`missing`: the reasons why sites cannot run."""
        return Capabilities(
            sites=frozenset(_REFUSALS),
            supports={
                **ENGINE_SUPPORTS,
                "dtype": frozenset(_TORCH_DTYPES),
                "execution": frozenset({Execution.EAGER} if interpreted else Execution),
                "rank": range(1, MAX_RANK + 1),
                # vLLM's operators assert that input and output are contiguous
                "layout": frozenset({Layout.CONTIGUOUS, Layout.PADDED_ROWS}),
                "path": frozenset(Path),
                "parallel": frozenset(Parallel),
                # its layers are cut by the size of their process group
                "tp": range(1, 2),
                "ep": range(1, 2),
                "bias": frozenset(Bias),
                "input_dims": range(2, 4),
                "streams": frozenset(Streams),
            },
            # compiled, the split-K partials of a shrink are added with atomics in any order; the
            # interpreter runs one program after the other
            deterministic=interpreted or batch_invariant,
            rank_per_slice=True,
            folds_scale_into_weights=True,
            pointer_tables=POINTER_TABLES,
            host_tensors=host_tensors,
            refuses=partial(_refuses, missing),
        )

    def engine_target(self, case: Case) -> str:
        return "loragate.subjects.vllm.engine:stock"

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> AnyInstance:
        if base is not None:
            layers = load_vllm_layers(machine)
            assert not isinstance(layers, str), layers
            if isinstance(base, BaseExperts):
                return VllmMoELayer(layers, case, machine.device, base)
            return VllmLoRALinear(layers, case, machine.device, base)
        if case.site in MOE_SITES:
            moe_ops = load_vllm_moe(machine)
            assert not isinstance(moe_ops, str), moe_ops
            return VllmMoEInstance.of_case(moe_ops, case, machine.device)
        ops = load_vllm(machine)
        assert not isinstance(ops, str), ops
        return VllmInstance(
            ops,
            num_slots=case.slots,
            slices=case.slices,
            in_features=case.in_features,
            rank=case.rank,
            # the oracles give even a case without tokens steps with one token
            max_tokens=max(case.tokens, 1),
            dtype=_TORCH_DTYPES[case.dtype],
            device=machine.device,
        )


def _refuses(missing: Mapping[Site, str], case: Case) -> str | None:
    return missing.get(case.site) or _REFUSALS[case.site](case)
