"""Serve several PEFT adapters in one batch, through one packed q, k and v projection.

    python examples/serve_peft_folders.py            two small adapters made on the spot
    python examples/serve_peft_folders.py DIR DIR    folders of your own: their q, k and v
                                                     factors of the first layer

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

if not torch.cuda.is_available():
    # read when a kernel is defined, so before lorakernels is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from lorakernels import (
    Adapter,
    AdapterError,
    AdapterSlots,
    BatchMetadata,
    DenseWorkspace,
    LoRALinear,
    Slice,
    read_peft_folder,
)
from lorakernels.runtime import interpreter

DEVICE = "cpu" if interpreter.is_on() else "cuda"
ATTENTION = "model.layers.0.self_attn"
WIDTHS = {"q_proj": 64, "k_proj": 32, "v_proj": 32}


def write_example(folder: Path, rank: int, seed: int) -> Path:
    """A folder as `save_pretrained` of PEFT leaves it, here with random factors."""
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 16,
        "use_rslora": True,
        "target_modules": list(WIDTHS),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, width in WIDTHS.items():
        prefix = f"base_model.model.{ATTENTION}.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, 64, generator=generator)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, rank, generator=generator) / 32
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def first_attention(adapter: Adapter) -> Adapter:
    """Only what this example serves; a real model has a layer for every module."""
    modules = [f"{ATTENTION}.{name}" for name in WIDTHS]
    kept = {m: factors for m, factors in adapter.modules.items() if m in modules}
    if not kept:
        raise AdapterError(f"adapter {adapter.name} has no factors for {', '.join(modules)}")
    return Adapter(adapter.name, kept)


def serve(adapters: list[Adapter]) -> None:
    shapes = {m.rpartition(".")[2]: f for a in adapters for m, f in a.modules.items()}
    widths = {name: f.b.shape[0] for name, f in shapes.items()}
    in_features = next(iter(shapes.values())).a.shape[1]
    weight = torch.randn(sum(widths.values()), in_features, device=DEVICE) / in_features**0.5
    layer = LoRALinear(
        weight,
        slices=[Slice(name, width) for name, width in widths.items()],
        num_slots=len(adapters),
        rank=max(f.rank for a in adapters for f in a.modules.values()),
    )
    slots = AdapterSlots({f"{ATTENTION}.qkv_proj": layer})
    for adapter in adapters:
        print(f"{adapter.name}: slot {slots.activate(adapter)}, {len(adapter.modules)} modules")

    # two rows of each adapter with a base row, which has slot -1, before each pair
    rows = [s for name in slots.names for s in (-1, slots.slot_of(name), slots.slot_of(name))]
    metadata = BatchMetadata(max_tokens=len(rows), max_slots=layer.num_slots, device=DEVICE)
    workspace = DenseWorkspace([layer.slots], max_tokens=len(rows))
    x = torch.randn(len(rows), in_features, device=DEVICE)
    metadata.prepare(torch.tensor(rows, dtype=torch.int32))
    out = layer(x, metadata, workspace)

    delta = out - x @ weight.T
    for row, slot in enumerate(rows):
        who = "base" if slot < 0 else slots.names[slot]
        print(f"row {row}: {who:12} largest change {delta[row].abs().max():.3f}")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(argument) for argument in sys.argv[1:]] or [
            write_example(Path(scratch) / "french", rank=4, seed=1),
            write_example(Path(scratch) / "german", rank=8, seed=2),
        ]
        # by the paths that were given, since several folders may have one name
        names = sys.argv[1:] or [folder.name for folder in folders]
        named = zip(folders, names, strict=True)
        serve([first_attention(read_peft_folder(folder, name=name)) for folder, name in named])


if __name__ == "__main__":
    try:
        main()
    except AdapterError as refusal:
        sys.exit(str(refusal))
