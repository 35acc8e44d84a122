"""Results are compared with PEFT: it reads the same folders into tiny Hugging Face models, one
at a time, and lorakernels reads them into packed linears that serve all of them in one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loragate.core.machine import detect_machine, select_interpreter

select_interpreter()

from lorakernels.adapters.peft_folder import read_peft_folder  # noqa: E402
from lorakernels.adapters.slots import AdapterSlots  # noqa: E402
from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

DEVICE = detect_machine().device
SLOTS, RANK, TOKENS, VOCABULARY = 3, 8, 3, 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


@dataclass
class Step:
    """State that all layers of a served model share in one forward pass."""

    metadata: BatchMetadata
    workspace: DenseWorkspace | None = None


class Packed:
    """One packed layer in place of several modules that are called with the same input."""

    def __init__(self, layer: LoRALinear, step: Step) -> None:
        self.layer, self.step = layer, step
        self._last: tuple[Tensor, Tensor] | None = None

    def output(self, x: Tensor) -> Tensor:
        assert self.step.workspace is not None
        if self._last is None or self._last[0] is not x:
            self._last = (x, self.layer(x, self.step.metadata, self.step.workspace))
        return self._last[1]


class Columns(nn.Module):
    """A module of the original model that is now a range of columns of a packed layer."""

    def __init__(self, packed: Packed, columns: slice) -> None:
        super().__init__()
        self.packed, self.columns = packed, columns

    def forward(self, x: Tensor) -> Tensor:
        return self.packed.output(x)[..., self.columns]


def pack(parent: nn.Module, names: list[str], step: Step) -> LoRALinear:
    """Put one LoRALinear in place of several linears that read the same input."""
    linears = [parent.get_submodule(name) for name in names]
    bias = None if linears[0].bias is None else torch.cat([m.bias for m in linears])
    layer = LoRALinear(
        torch.cat([m.weight for m in linears]),
        bias,
        slices=[Slice(n, m.out_features) for n, m in zip(names, linears, strict=True)],
        num_slots=SLOTS,
        rank=RANK,
    )
    packed, start = Packed(layer, step), 0
    for name, linear in zip(names, linears, strict=True):
        columns = slice(start, start + linear.out_features)
        setattr(parent, name, Columns(packed, columns))
        start = columns.stop
    return layer


def split(parent: nn.Module, name: str, widths: dict[str, int], step: Step) -> LoRALinear:
    """Put a LoRALinear with several slices in place of one fused linear."""
    linear = parent.get_submodule(name)
    layer = LoRALinear(
        linear.weight,
        slices=[Slice(part, width) for part, width in widths.items()],
        num_slots=SLOTS,
        rank=RANK,
        fused={name: tuple(widths)},
    )
    setattr(parent, name, Columns(Packed(layer, step), slice(None)))
    return layer


def pack_block(block: nn.Module, step: Step) -> dict[str, LoRALinear]:
    if hasattr(block.self_attn, "qkv_proj"):
        first = {
            "self_attn.qkv_proj": split(
                block.self_attn, "qkv_proj", {"q": 32, "k": 16, "v": 16}, step
            ),
            "mlp.gate_up_proj": split(block.mlp, "gate_up_proj", {"gate": 40, "up": 40}, step),
        }
    else:
        first = {
            "self_attn.qkv": pack(block.self_attn, ["q_proj", "k_proj", "v_proj"], step),
            "mlp.gate_up": pack(block.mlp, ["gate_proj", "up_proj"], step),
        }
    return first | {
        "self_attn.o_proj": pack(block.self_attn, ["o_proj"], step),
        "mlp.down_proj": pack(block.mlp, ["down_proj"], step),
    }


class Served:
    """A model whose linears are packed, with SLOTS slots."""

    def __init__(self, base: nn.Module) -> None:
        rows = 4 * TOKENS
        self.model = copy.deepcopy(base)
        self.step = Step(BatchMetadata(max_tokens=rows, max_slots=SLOTS, device=DEVICE))
        layers = {
            f"model.layers.{index}.{name}": layer
            for index, block in enumerate(self.model.model.layers)
            for name, layer in pack_block(block, self.step).items()
        }
        layers["lm_head"] = pack(self.model, ["lm_head"], self.step)
        self.step.workspace = DenseWorkspace([x.slots for x in layers.values()], max_tokens=rows)
        self.slots = AdapterSlots(layers)

    def logits(self, ids: Tensor, names: list[str | None]) -> Tensor:
        """`names` has the adapter of each sequence, None for the base model."""
        chosen = [-1 if name is None else self.slots.slot_of(name) for name in names]
        rows = torch.tensor(chosen, dtype=torch.int32).repeat_interleave(ids.shape[1])
        self.step.metadata.prepare(rows.to(DEVICE))
        return logits(self.model, ids)


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def qwen2() -> nn.Module:
    # has a bias on q, k and v
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))
    for block in model.model.layers:
        nn.init.normal_(block.self_attn.k_proj.bias)
    return model


def qwen3() -> nn.Module:
    # head size apart from hidden size, norms between projection and attention
    config = transformers.Qwen3Config(**SIZES, head_dim=16)
    return transformers.Qwen3ForCausalLM(config)


def phi3() -> nn.Module:
    # qkv_proj and gate_up_proj are one linear each, also for the adapter
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES))


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SEPARATE: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 10, "target_modules": ALL},
    "patterns": {
        "r": 6,
        "lora_alpha": 3,
        "use_rslora": True,
        "target_modules": r".*\.(q_proj|v_proj|up_proj|down_proj)",
        "rank_pattern": {"layers.1.self_attn.v_proj": 3, "up_proj": 8},
        "alpha_pattern": {r"layers\.0\.mlp\.up_proj": 11, "q_proj": 5},
    },
    "narrow": {
        "r": 2,
        "lora_alpha": 9,
        "target_modules": ["k_proj", "gate_proj", "o_proj"],
        "layers_to_transform": [1],
    },
    # PEFT saves the base weight of the head, too
    "head": {"r": 3, "lora_alpha": 5, "target_modules": ["v_proj", "lm_head"]},
}
FUSED: dict[str, dict[str, Any]] = {
    "plain": {
        "r": 4,
        "lora_alpha": 10,
        "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    },
    "patterns": {
        "r": 5,
        "lora_alpha": 3,
        "use_rslora": True,
        "target_modules": ["qkv_proj", "gate_up_proj"],
        "alpha_pattern": {"layers.1.self_attn.qkv_proj": 7},
    },
}


def train(base: nn.Module, options: dict[str, Any], folder: Path) -> Path:
    """A folder that PEFT wrote, with factors as if they had been trained."""
    # B is zero by default, and a test with it would pass without the adapter
    config = peft.LoraConfig(**options, init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def judge(base: nn.Module, folder: Path, ids: Tensor) -> Tensor:
    return logits(peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).eval(), ids)


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "family"),
    [(qwen2, SEPARATE), (qwen3, SEPARATE), (phi3, FUSED)],
    ids=["qwen2", "qwen3", "phi3"],
)
def test_one_batch_of_many_adapters_is_what_peft_gives_one_by_one(
    build: Callable[[], nn.Module], family: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    torch.manual_seed(7)
    base = build().to(DEVICE).eval()
    ids = torch.randint(1, VOCABULARY, (4, TOKENS), device=DEVICE)
    served = Served(base)
    family = {name: how for name, how in family.items() if name != "head"}
    folders = {name: train(base, how, tmp_path / name) for name, how in family.items()}
    for name, folder in reversed(folders.items()):
        served.slots.activate(read_peft_folder(folder, name=name))

    names: list[str | None] = [None, *folders, "plain"][:4]
    got = served.logits(ids, names)
    plain = logits(base, ids)
    for row, name in enumerate(names):
        sequence = ids[row : row + 1]
        if name is None:
            assert_close(got[row : row + 1], plain[row : row + 1])
        else:
            assert (got[row] - plain[row]).abs().max() > 0.05
            assert_close(got[row : row + 1], judge(base, folders[name], sequence))


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_in_the_slot_of_an_evicted_one_is_what_peft_gives(tmp_path: Path) -> None:
    torch.manual_seed(8)
    base = llama().to(DEVICE).eval()
    ids = torch.randint(1, VOCABULARY, (2, TOKENS), device=DEVICE)
    served = Served(base)
    for name in ("plain", "narrow", "head"):
        folder = train(base, SEPARATE[name], tmp_path / name)
        served.slots.activate(read_peft_folder(folder))
        got = served.logits(ids, [name, None])
        assert_close(got[:1], judge(base, folder, ids[:1]))
        assert_close(got[1:], logits(base, ids[1:]))
        served.slots.evict(name)
