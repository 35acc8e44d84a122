"""Subject `vllm`, site lora_linear: the linear layers of vLLM with adapters, on one stream and on
two.

The class of the layer follows from the case as it does from a model, and a server's own function
chooses the class with adapters. Layers are built for one process: vLLM cuts a layer by the size of
its process group, so that several ranks cannot run in one process.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from loragate.inputs.draw import torch_dtype
from loragate.matrix.case import Bias, Case, Parallel, Streams
from loragate.protocol import BaseLayer, Pool
from loragate.subjects.vllm.layer_host import LayerHost
from loragate.subjects.vllm.layer_package import VllmLayers
from loragate.subjects.vllm.package import fold_scale


def refusal(case: Case) -> str | None:
    """The reason why vLLM 0.26 cannot run a case of lora_linear, or None."""
    one_slice, dual = len(case.slices) == 1, case.streams is Streams.DUAL
    reasons = {
        f"a row-parallel layer of {len(case.slices)} slices: its layer has one": (
            case.parallel is Parallel.ROW and not one_slice
        ),
        "its replicated layer of one slice runs on one stream, whatever the option says": (
            case.parallel is Parallel.REPLICATED and one_slice and dual
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class VllmLoRALinear:
    """One layer, and the server around it."""

    def __init__(self, package: VllmLayers, case: Case, device: str, base: BaseLayer) -> None:
        self._case = case
        self._host = LayerHost(package, case, device)
        with self._host.building():
            layer = _plain_layer(package.linear, case)
        layer.weight = nn.Parameter(base.weight, requires_grad=False)
        if base.bias is not None:
            layer.bias = nn.Parameter(base.bias, requires_grad=False)
        names = [f"slice{part}" for part in range(len(case.slices))]
        self.layer = self._host.with_adapters(layer, names)
        a, b = self.layer.lora_a_stacked, self.layer.lora_b_stacked
        # addresses of an earlier layer may mean something else in this one
        package.ops.forget(a, b)
        weakref.finalize(self, package.ops.forget, a, b).atexit = False

    def load(self, slot: int, pool: Pool) -> None:
        parts: list[tuple[Tensor, Tensor] | None] = []
        for part, (rank, scale) in enumerate(zip(pool.ranks[slot], pool.scales[slot], strict=True)):
            b = fold_scale(pool.b[part][slot, :, :rank], scale)
            parts.append((pool.a[slot, part, :rank], b) if rank else None)
        if not any(parts):
            self.unload(slot)
        elif len(parts) == 1 and parts[0] is not None:
            self.layer.set_lora(slot, *parts[0])
        else:
            self.layer.set_lora(
                slot, [part and part[0] for part in parts], [part and part[1] for part in parts]
            )

    def unload(self, slot: int) -> None:
        self.layer.reset_lora(slot)

    def prepare(self, token_slots: Tensor) -> None:
        self._host.prepare(token_slots)

    def host_tensors(self) -> list[Tensor]:
        return self._host.host_tensors()

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return self.call(self._as_input(x)).view(out.shape)

    def call(self, x: Tensor) -> Tensor:
        """The layer on x of any shape."""
        with self._host.running():
            result: Tensor = self.layer(x)
        return result

    def _as_input(self, x: Tensor) -> Tensor:
        if self._case.input_dims == 2:
            return x
        # models of transformers have a dimension of length 1 in front. Others are flattened on one
        # stream only: the form of two streams takes the second dimension for the number of rows
        count = 1 if len(x) % 2 or self._case.streams is Streams.DUAL else 2
        return x.view(count, len(x) // count, x.shape[1])


def host_tensors(instance: Any) -> Sequence[Tensor]:
    """Of an instance at any site; only layers run on modelled streams."""
    return instance.host_tensors() if isinstance(instance, VllmLoRALinear) else ()


def _plain_layer(linear: Any, case: Case) -> Any:
    """The layer without adapters, as a model has it."""
    options: dict[str, Any] = {
        "bias": case.bias is Bias.PRESENT,
        "params_dtype": torch_dtype(case.dtype),
        "return_bias": False,
        "prefix": "layer",
    }
    if case.parallel is Parallel.ROW:
        return linear.RowParallelLinear(case.in_features, *case.slices, **options)
    if len(case.slices) == 1:
        is_whole = case.parallel is Parallel.REPLICATED
        kind = linear.ReplicatedLinear if is_whole else linear.ColumnParallelLinear
        return kind(case.in_features, *case.slices, **options)
    if case.parallel is Parallel.COLUMN and _is_attention(case.slices):
        query, key, _ = case.slices
        head = math.gcd(query, key)
        heads = (query // head, key // head)
        return linear.QKVParallelLinear(case.in_features, head, *heads, **options)
    # all that is replicated of a layer of several slices is that it is not cut
    options["disable_tp"] = case.parallel is Parallel.REPLICATED
    return linear.MergedColumnParallelLinear(case.in_features, [*case.slices], **options)


def _is_attention(slices: tuple[int, ...]) -> bool:
    """Whether these can be the widths of query, key and value."""
    return len(slices) == 3 and slices[1] == slices[2]
