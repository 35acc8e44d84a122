"""Generate text with several PEFT adapters in one batch, and with the base model beside them.

    python examples/generate_with_adapters.py
        a tiny model and two adapters made on the spot: prints tokens
    python examples/generate_with_adapters.py CHECKPOINT DIR DIR --prompt "Once upon a time"
        folders of a Qwen3, Qwen3-MoE or Qwen3-Next checkpoint and of adapters: prints text
    python examples/generate_with_adapters.py --drafts 3
        with drafts: up to three tokens that followed the same words before are verified in a step

Without a GPU the kernels run in Triton's interpreter, which is for tiny models only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

if not torch.cuda.is_available():
    # read when a kernel is defined, so before lorakernels is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from lorakernels import (
    Adapter,
    AdapterError,
    Decoder,
    NgramDrafts,
    Request,
    generate,
    read_peft_folder,
)
from lorakernels.runtime import interpreter
from lorakernels.serving.tiny import tiny_model

DEVICE = "cpu" if interpreter.is_on() else "cuda"
TARGETS = ("q_proj", "v_proj", "down_proj")
TINY_PROMPT = [5, 17, 42, 8]


def write_example(folder: Path, model: PreTrainedModel, rank: int, seed: int) -> Path:
    """A folder as `save_pretrained` of PEFT leaves it, here with random factors."""
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 3 * rank,
        "target_modules": list(TARGETS),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(TARGETS):
            prefix = f"base_model.model.{name}"
            a = torch.randn(rank, module.in_features, generator=generator)
            b = torch.randn(module.out_features, rank, generator=generator)
            tensors[f"{prefix}.lora_A.weight"] = a / module.in_features**0.5
            tensors[f"{prefix}.lora_B.weight"] = b / rank**0.5
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def serve(
    model: PreTrainedModel,
    adapters: list[Adapter],
    prompt: list[int],
    max_new_tokens: int,
    num_drafts: int,
) -> list[tuple[str, list[int]]]:
    """The answer of the base model and of each adapter, all decoded together."""
    names = [adapter.name for adapter in adapters]
    requests = [Request(tuple(prompt), name) for name in (None, *names)]
    factors = [f for adapter in adapters for f in adapter.modules.values()]
    decoder = Decoder(
        model.to(DEVICE),
        num_slots=len(adapters),
        rank=max(f.a.shape[-2] for f in factors),
        max_requests=len(requests),
        max_length=len(prompt) + max_new_tokens,
        max_prompt_tokens=len(prompt) * len(requests),
        lm_head=any("lm_head" in adapter.modules for adapter in adapters),
        embed_tokens=any("model.embed_tokens" in adapter.modules for adapter in adapters),
        graph_sizes=range(1, len(requests) + 1),
        num_drafts=num_drafts,
    )
    # on a GPU; adapters are loaded afterwards, as they may be at any time
    decoder.capture()
    for adapter in adapters:
        print(f"{adapter.name}: slot {decoder.slots.activate(adapter)}")
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    drafter = NgramDrafts() if num_drafts else None
    answers = generate(decoder, requests, config, drafter=drafter)
    return list(zip(("base", *names), answers, strict=True))


def run_tiny(max_new_tokens: int, num_drafts: int) -> None:
    model = tiny_model("qwen3")
    with tempfile.TemporaryDirectory() as scratch:
        folders = [
            write_example(Path(scratch) / "french", model, rank=4, seed=1),
            write_example(Path(scratch) / "german", model, rank=8, seed=2),
        ]
        adapters = [read_peft_folder(folder) for folder in folders]
    print(f"prompt: {TINY_PROMPT}")
    answers = serve(model, adapters, TINY_PROMPT, max_new_tokens, num_drafts)
    for name, tokens in answers:
        print(f"answer of {name}: {tokens}")


def run_checkpoint(
    checkpoint: Path, folders: list[Path], prompt: str, max_new_tokens: int, num_drafts: int
) -> None:
    # by their paths, since several folders may have one name
    adapters = [read_peft_folder(folder, name=str(folder)) for folder in folders]
    options = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, **options)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype="auto", use_safetensors=True, **options
    )
    ids = tokenizer(prompt)["input_ids"]
    print(f"prompt: {prompt}")
    for name, tokens in serve(model, adapters, ids, max_new_tokens, num_drafts):
        print(f"answer of {name}: {tokenizer.decode(tokens, skip_special_tokens=True)!r}")
        print(f"  tokens: {tokens}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate with several adapters in one batch.")
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("adapters", nargs="*", type=Path)
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--max-new-tokens", type=int, default=8)
    parser.add_argument("--drafts", type=int, default=0, help="most drafts of a step, 0 for none")
    given = parser.parse_args()
    if given.checkpoint is None:
        run_tiny(given.max_new_tokens, given.drafts)
    elif given.adapters:
        run_checkpoint(
            given.checkpoint, given.adapters, given.prompt, given.max_new_tokens, given.drafts
        )
    else:
        parser.error("give the folder of an adapter beside that of the checkpoint")


if __name__ == "__main__":
    try:
        main()
    except AdapterError as refusal:
        sys.exit(str(refusal))
