"""The linear layers of a few decoder layers of lorakernels, as a step that a graph replays. What
lies between them in a model, attention and norms, is left out: adapters have no part in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from loragate.bench.graphs_rows import ModelShape
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.moe import FusedMoELoRA
from lorakernels.layers.partition import Slice
from lorakernels.serving.buffers import ServingBuffers
from lorakernels.serving.dummy import dummy_adapters
from lorakernels.serving.inputs import InputSpec, StepInputs

_VOCABULARY = 512
_SEED = 1


class DecodeSteps:
    """Weights are drawn. `allocated`: bytes of a GPU that the reservation of the adapters' buffers
    took, which says of itself that it took `buffers.num_bytes`."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        layers: int,
        slots: int,
        rank: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.shape, self._slots, self._rank = shape, slots, rank
        self._generator = torch.Generator(device).manual_seed(_SEED)
        self._dtype, self._device = dtype, device
        self.embedding = self._draw(_VOCABULARY, shape.hidden)
        self.router = self._draw(max(1, shape.experts), shape.hidden)
        self.layers: dict[str, LoRALinear | FusedMoELoRA] = {}
        for number in range(layers):
            self.layers |= {f"{number}.{name}": one for name, one in self._layer().items()}
        before = _allocated(device)
        self.buffers = ServingBuffers.reserve(
            self.layers, max_tokens=max_tokens, top_k=shape.top_k or None
        )
        self.allocated = _allocated(device) - before
        self.inputs = StepInputs(
            {"ids": InputSpec(dtype=torch.int64)}, max_tokens=max_tokens, device=device
        )
        self._count = layers

    def step(self, rows: int) -> Tensor:
        """[rows, hidden]: the first rows of the inputs, through all layers."""
        x = self.embedding[self.inputs["ids"][:rows]]
        for number in range(self._count):
            heads = self._linear(f"{number}.qkv", x)[:, : self.shape.qkv[0]]
            x = self._linear(f"{number}.o", heads)
            x = self._experts(number, x) if self.shape.experts else self._mlp(number, x)
        return x

    @contextmanager
    def adapters(self) -> Iterator[None]:
        """Adapters of full rank in all slots."""
        with dummy_adapters(self.buffers.slot_weights):
            yield

    def _linear(self, name: str, x: Tensor) -> Tensor:
        layer, workspace = self.layers[name], self.buffers.dense
        assert isinstance(layer, LoRALinear)
        assert workspace is not None
        result: Tensor = layer(x, self.buffers.batch, workspace)
        return result

    def _mlp(self, number: int, x: Tensor) -> Tensor:
        gate, up = self._linear(f"{number}.gate_up", x).chunk(2, dim=1)
        return self._linear(f"{number}.down", functional.silu(gate) * up)

    def _experts(self, number: int, x: Tensor) -> Tensor:
        layer = self.layers[f"{number}.experts"]
        assert isinstance(layer, FusedMoELoRA)
        scores = (x @ self.router.T).float().softmax(dim=1)
        weights, ids = scores.topk(self.shape.top_k, dim=1)
        pairs, scratch = self.buffers.pairs(layer), self.buffers.experts(layer)
        result: Tensor = layer(x, ids.int(), weights, self.buffers.batch, pairs, scratch)
        return result

    def _layer(self) -> dict[str, LoRALinear | FusedMoELoRA]:
        shape = self.shape
        found: dict[str, LoRALinear | FusedMoELoRA] = {
            "qkv": self._make(shape.hidden, shape.qkv),
            "o": self._make(shape.qkv[0], (shape.hidden,)),
        }
        if shape.experts:
            found["experts"] = FusedMoELoRA(
                self._draw(shape.experts, 2 * shape.intermediate, shape.hidden),
                self._draw(shape.experts, shape.hidden, shape.intermediate),
                gate_up=GateUp.HALVES,
                num_slots=self._slots,
                rank=self._rank,
            )
        else:
            found["gate_up"] = self._make(shape.hidden, (shape.intermediate,) * 2)
            found["down"] = self._make(shape.intermediate, (shape.hidden,))
        return found

    def _make(self, width: int, slices: tuple[int, ...]) -> LoRALinear:
        names = [Slice(f"slice{number}", size) for number, size in enumerate(slices)]
        weight = self._draw(sum(slices), width)
        return LoRALinear(weight, slices=names, num_slots=self._slots, rank=self._rank)

    def _draw(self, *shape: int) -> Tensor:
        values = torch.randn(
            shape, generator=self._generator, dtype=self._dtype, device=self._device
        )
        return values.mul_(shape[-1] ** -0.5)


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if torch.device(device).type == "cuda" else 0
