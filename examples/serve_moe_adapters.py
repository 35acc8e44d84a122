"""Serve several PEFT adapters in one batch, on the experts of a MoE layer.

    python examples/serve_moe_adapters.py            two small adapters made on the spot
    python examples/serve_moe_adapters.py DIR DIR    folders of your own: their factors of the
                                                     experts of the first layer, all numbered

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

if not torch.cuda.is_available():
    # read when a kernel is defined, so before the first kernel of lorakernels is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from lorakernels import (
    Adapter,
    AdapterError,
    AdapterSlots,
    BatchMetadata,
    FusedMoELoRA,
    GateUp,
    MoEScratch,
    PairMetadata,
    read_peft_folder,
)
from lorakernels.runtime import interpreter

DEVICE = "cpu" if interpreter.is_on() else "cuda"
MLP = "model.layers.0.mlp"
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 32, 48
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def write_example(folder: Path, rank: int, seed: int) -> Path:
    """A folder as `save_pretrained` of PEFT leaves it, here with random factors."""
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(PROJECTIONS),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for expert in range(EXPERTS):
        for name in PROJECTIONS:
            prefix = f"base_model.model.{MLP}.experts.{expert}.{name}"
            down = name == "down_proj"
            inputs, width = (INTERMEDIATE, HIDDEN) if down else (HIDDEN, INTERMEDIATE)
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            b = torch.randn(width, rank, generator=generator) / rank**0.5
            tensors[f"{prefix}.lora_A.weight"] = a
            tensors[f"{prefix}.lora_B.weight"] = b
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def experts_of(adapter: Adapter) -> Adapter:
    """Only what this example serves; a real model has a layer for every module."""
    kept = {m: f for m, f in adapter.modules.items() if m.startswith(f"{MLP}.experts.")}
    if not kept:
        raise AdapterError(f"adapter {adapter.name} has no factors for {MLP}.experts")
    return Adapter(adapter.name, kept)


def base_layer(adapters: list[Adapter]) -> FusedMoELoRA:
    """A layer with random weights, as wide as the adapters."""
    modules = {m: f for adapter in adapters for m, f in adapter.modules.items()}
    hidden = next(f.a.shape[-1] for m, f in modules.items() if m.endswith("up_proj"))
    intermediate = next(f.b.shape[-2] for m, f in modules.items() if m.endswith("up_proj"))
    experts = 1 + max(int(m.split(".experts.")[1].split(".")[0]) for m in modules)
    w13 = torch.randn(experts, 2 * intermediate, hidden, device=DEVICE) / hidden**0.5
    w2 = torch.randn(experts, hidden, intermediate, device=DEVICE) / intermediate**0.5
    rank = max(f.rank for f in modules.values())
    return FusedMoELoRA(w13, w2, gate_up=GateUp.HALVES, num_slots=len(adapters), rank=rank)


def route(x: Tensor, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """What a router gives: int32 ids and fp32 weights of the experts, [rows, top_k] each."""
    router = torch.randn(experts, x.shape[1], device=x.device) / x.shape[1] ** 0.5
    weights, ids = (x @ router.T).softmax(dim=-1).topk(top_k)
    return ids.int(), weights / weights.sum(dim=-1, keepdim=True)


class Server:
    """A layer with what is allocated once, for batches of up to `max_tokens` rows."""

    def __init__(self, layer: FusedMoELoRA, *, max_tokens: int, top_k: int) -> None:
        self.layer = layer
        sizes = {"max_tokens": max_tokens, "max_slots": layer.num_slots}
        self.batch = BatchMetadata(**sizes, device=DEVICE)
        experts = layer.packing.num_experts
        self.pairs = PairMetadata(
            **sizes, top_k=top_k, num_experts=experts, device=DEVICE, with_base=True
        )
        # shared by all layers of these sizes, which run one after the other
        self.scratch = MoEScratch([layer], max_tokens=max_tokens, top_k=top_k)

    def run(self, slots: list[int], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The output for rows with the adapters of these slots, -1 for a base row."""
        self.batch.prepare(torch.tensor(slots, dtype=torch.int32))
        out: Tensor = self.layer(x, ids, weights, self.batch, self.pairs, self.scratch)
        return out


def serve(adapters: list[Adapter]) -> None:
    layer = base_layer(adapters)
    slots = AdapterSlots({f"{MLP}.experts": layer})
    for adapter in adapters:
        print(f"{adapter.name}: slot {slots.activate(adapter)}, {len(adapter.modules)} modules")

    # two rows of each adapter with a base row, which has slot -1, before each pair
    rows = [s for name in slots.names for s in (-1, slots.slot_of(name), slots.slot_of(name))]
    experts, hidden = layer.packing.num_experts, layer.packing.hidden
    server = Server(layer, max_tokens=len(rows), top_k=min(TOP_K, experts))
    x = torch.randn(len(rows), hidden, device=DEVICE)
    ids, weights = route(x, experts, server.pairs.top_k)
    out = server.run(rows, x, ids, weights)

    delta = out - server.run([-1] * len(rows), x, ids, weights)
    for row, slot in enumerate(rows):
        who = "base" if slot < 0 else slots.names[slot]
        change = delta[row].abs().max()
        print(f"row {row}: {who:12} experts {ids[row].tolist()} largest change {change:.3f}")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(argument) for argument in sys.argv[1:]] or [
            write_example(Path(scratch) / "french", rank=4, seed=1),
            write_example(Path(scratch) / "german", rank=8, seed=2),
        ]
        # by the paths that were given, since several folders may have one name
        names = sys.argv[1:] or [folder.name for folder in folders]
        named = zip(folders, names, strict=True)
        serve([experts_of(read_peft_folder(folder, name=name)) for folder, name in named])


if __name__ == "__main__":
    try:
        main()
    except AdapterError as refusal:
        sys.exit(str(refusal))
