"""Results are compared with PEFT: adapters that it saved for the experts of tiny models are read
into the slots of MoE layers and applied there in plain torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from lorakernels.adapters.errors import AdapterError
from lorakernels.adapters.expert_layout import ExpertLayout
from lorakernels.adapters.peft_folder import read_peft_folder
from lorakernels.adapters.slots import AdapterSlots
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.weights import ExpertWeights

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K, LAYERS = 4, 24, 10, 7, 2, 2
WEIGHTS = "adapter_model.safetensors"
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
NAMES = [f"model.layers.{index}.mlp.experts" for index in range(LAYERS)]


def qwen3(hidden: int = HIDDEN, intermediate: int = INTERMEDIATE) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    # grouped GEMMs want sizes that are multiples of 16 bytes
    return transformers.Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager")


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Numbered(nn.Module):
    """A model whose experts are modules of their own, as checkpoints name them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        torch.manual_seed(0)
        for _ in range(LAYERS):
            block = nn.Module()
            block.mlp = nn.Module()
            block.mlp.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
            self.model.layers.append(block)


def experts_of(model: nn.Module, index: int) -> nn.Module:
    """The experts of a layer, wrapped by PEFT or not."""
    return model.get_submodule(f"model.layers.{index}.mlp").experts  # type: ignore[return-value]


def routing() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    x, scores = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, EXPERTS)
    weights, ids = torch.topk(scores.softmax(dim=-1), TOP_K)
    return x, ids, weights


def judged(model: nn.Module, index: int) -> Tensor:
    """What a layer's experts give, adapter included if the model is wrapped."""
    x, ids, weights = routing()
    experts = experts_of(model, index)
    with torch.no_grad():
        if not isinstance(experts, nn.ModuleList):
            return experts(x, ids, weights)
        rows = [
            sum(w * experts[int(e)](row) for e, w in zip(chosen, ws, strict=True))
            for row, chosen, ws in zip(x, ids, weights, strict=True)
        ]
    return torch.stack(rows)


def delta(slots: ExpertWeights, slot: int, expert: int, row: Tensor) -> Tensor:
    """What the slots add to one projection of one row, rank by rank and slice by slice."""
    a, b = slots.a[slot, min(expert, slots.a.shape[1] - 1)], slots.b[slot]
    pieces = torch.split(b[min(expert, b.shape[0] - 1)], slots.slice_widths)
    return torch.cat(
        [
            slots.scales[slot, s] * piece[:, :r] @ (a[s, :r] @ row)
            for s, piece in enumerate(pieces)
            for r in [int(slots.ranks[slot, s])]
        ]
    )


def served(layer: FusedMoELoRA, slot: int) -> Tensor:
    x, ids, weights = routing()
    out = torch.zeros(TOKENS, HIDDEN)
    for token, choice in ((t, c) for t in range(TOKENS) for c in range(TOP_K)):
        e = int(ids[token, choice])
        first = layer.w13[e] @ x[token] + delta(layer.w13_slots, slot, e, x[token])
        gate, up = first.split(INTERMEDIATE)
        inner = F.silu(gate) * up
        second = layer.w2[e] @ inner + delta(layer.w2_slots, slot, e, inner)
        out[token] += weights[token, choice] * second
    return out


def served_batch(layer: FusedMoELoRA, slots: list[int]) -> Tensor:
    """The same by the kernels, each row with the slot that it names."""
    x, ids, weights = routing()
    sizes = {"max_tokens": TOKENS, "max_slots": layer.num_slots, "device": "cpu"}
    batch = BatchMetadata(**sizes)
    batch.prepare(torch.tensor(slots, dtype=torch.int32))
    pairs = PairMetadata(top_k=TOP_K, num_experts=EXPERTS, with_base=True, **sizes)
    scratch = MoEScratch([layer], max_tokens=TOKENS, top_k=TOP_K)
    return layer(x, ids.int(), weights, batch, pairs, scratch)


def layers_for(model: nn.Module, **options: Any) -> dict[str, FusedMoELoRA]:
    layers = {}
    for index, name in enumerate(NAMES):
        experts = experts_of(model, index)
        if isinstance(experts, nn.ModuleList):
            w13 = torch.stack([torch.cat([e.gate_proj.weight, e.up_proj.weight]) for e in experts])
            w2 = torch.stack([e.down_proj.weight for e in experts])
        else:
            w13, w2 = experts.gate_up_proj, experts.down_proj
        layers[name] = FusedMoELoRA(
            w13.detach().clone(),
            w2.detach().clone(),
            gate_up=GateUp.HALVES,
            num_slots=2,
            rank=6,
            **options,
        )
    return layers


def trained(model: nn.Module, folder: Path, **config: Any) -> nn.Module:
    """The model wrapped by PEFT with random factors, which are saved."""
    torch.manual_seed(1)
    fields = {"r": 3, "lora_alpha": 7, "init_lora_weights": False} | config
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**fields))
    wrapped.save_pretrained(folder)
    return wrapped.base_model.model


def assert_served(model: nn.Module, base: nn.Module, folder: Path, layout: ExpertLayout) -> None:
    layers = layers_for(base)
    slots = AdapterSlots(layers)
    adapter = read_peft_folder(folder, name="fr")
    assert adapter.expert_layout is layout
    slot = slots.activate(adapter)
    for index, name in enumerate(NAMES):
        wanted, without = judged(model, index), judged(base, index)
        assert not torch.allclose(wanted, without, rtol=0.1)
        torch.testing.assert_close(served(layers[name], slot), wanted)


STACKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"experts.down_proj": 5},
        "alpha_pattern": {r"layers\.1\.mlp\.experts\.gate_up_proj": 2},
    },
    "other-order": {"target_parameters": list(reversed(PARAMETERS))},
}


@pytest.mark.parametrize("config", STACKED.values(), ids=STACKED)
def test_stacked_experts_give_what_peft_gives(config: dict[str, Any], tmp_path: Path) -> None:
    # vllm #31534: the axis of experts is the slowest of lora_A and the fastest of lora_B
    config = {"target_modules": [], "target_parameters": PARAMETERS} | config
    model = trained(qwen3(), tmp_path, **config)
    assert_served(model, qwen3(), tmp_path, ExpertLayout.STACKED)


@pytest.mark.parametrize("parameter", PARAMETERS)
def test_one_parameter_of_the_experts_gives_what_peft_gives(parameter: str, tmp_path: Path) -> None:
    model = trained(qwen3(), tmp_path, target_modules=[], target_parameters=[parameter])
    assert_served(model, qwen3(), tmp_path, ExpertLayout.STACKED)


def test_modules_beside_parameters_without_a_module_name_keep_their_factors(tmp_path: Path) -> None:
    # peft 0.21 writes these names of experts as those of parameters
    names = ["gate_proj", "up_proj", "down_proj"]
    trained(qwen3(), tmp_path, target_modules=["q_proj", *names])
    adapter = read_peft_folder(tmp_path, name="fr")
    experts = [f"{name}.{parameter}" for name in NAMES for parameter in ("gate_up", "down")]
    modules = [f"model.layers.{index}.self_attn.q_proj" for index in range(LAYERS)]
    assert sorted(adapter.modules) == sorted([f"{name}_proj" for name in experts] + modules)


def test_experts_may_have_more_features_than_those_of_a_tiny_model(tmp_path: Path) -> None:
    # from 257 on, equal integers are objects of their own
    sizes = {"hidden": 520, "intermediate": 264}
    trained(qwen3(**sizes), tmp_path, target_modules=[], target_parameters=PARAMETERS)
    adapter = read_peft_folder(tmp_path, name="fr")
    assert sorted(adapter.modules) == sorted(
        f"{name}.{parameter}_proj" for name in NAMES for parameter in ("gate_up", "down")
    )


def test_factors_of_releases_that_took_the_output_for_the_input_are_turned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vllm #52194; today's PEFT does so for parameters that are stored the other way round
    model = qwen3()
    for index in range(LAYERS):
        monkeypatch.setattr(experts_of(model, index), "is_transposed", True, raising=False)
    model = trained(model, tmp_path, target_modules=[], target_parameters=PARAMETERS)
    stored = load_file(tmp_path / WEIGHTS)
    prefix = f"base_model.model.{NAMES[0]}"
    assert stored[f"{prefix}.lora_A.weight"].shape == (3 * EXPERTS, HIDDEN)
    assert stored[f"{prefix}.lora_B.weight"].shape == (INTERMEDIATE, 3 * EXPERTS)
    for index in range(LAYERS):
        monkeypatch.setattr(experts_of(model, index).get_base_layer(), "is_transposed", False)
    assert_served(model, qwen3(), tmp_path, ExpertLayout.STACKED)


NUMBERED: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "one projection": {"target_modules": ["up_proj"]},
    "patterns": {
        "target_modules": r".*\.experts\.\d+\.(gate|down)_proj",
        "use_rslora": True,
        "rank_pattern": {"down_proj": 6},
        "alpha_pattern": {r"layers\.1\..*\.gate_proj": 11},
    },
}


@pytest.mark.parametrize("config", NUMBERED.values(), ids=NUMBERED)
def test_experts_that_are_modules_give_what_peft_gives(
    config: dict[str, Any], tmp_path: Path
) -> None:
    model = trained(Numbered(), tmp_path, **config)
    assert_served(model, Numbered(), tmp_path, ExpertLayout.PER_EXPERT)


def test_shared_outer_factors_give_what_peft_gives_for_their_copies(tmp_path: Path) -> None:
    model = trained(Numbered(), tmp_path, **NUMBERED["plain"])
    stored = load_file(tmp_path / WEIGHTS)
    shared: dict[str, Tensor] = {}
    for name in NAMES:
        for projection, side in ((p, s) for p in ("gate", "up", "down") for s in "AB"):
            keys = [
                f"base_model.model.{name}.{e}.{projection}_proj.lora_{side}.weight"
                for e in range(EXPERTS)
            ]
            if side == ("B" if projection == "down" else "A"):
                for key in keys:
                    model.get_parameter(
                        key.removeprefix("base_model.model.").replace(".weight", ".default.weight")
                    ).data.copy_(stored[keys[0]])
                tensor = stored[keys[0]][None]
            else:
                tensor = torch.stack([stored[key] for key in keys])
            shared[f"base_model.model.{name}.{projection}_proj.lora_{side}.weight"] = tensor
    save_file({key: tensor.contiguous() for key, tensor in shared.items()}, tmp_path / WEIGHTS)
    base = Numbered()
    assert_served(model, base, tmp_path, ExpertLayout.SHARED_OUTER)
    layers = layers_for(base, shared_outer=True)
    slot = AdapterSlots(layers).activate(read_peft_folder(tmp_path))
    for index, name in enumerate(NAMES):
        assert layers[name].w13_slots.a.shape[1] == layers[name].w2_slots.b.shape[1] == 1
        torch.testing.assert_close(served(layers[name], slot), judged(model, index))


def test_the_scale_is_applied_once_however_often_an_adapter_is_loaded(tmp_path: Path) -> None:
    # SkyRL #2250, unsloth-zoo #951: folded into the durable copy
    config = {"target_modules": [], "target_parameters": PARAMETERS}
    model = trained(qwen3(), tmp_path, lora_alpha=10, **config)
    adapter = read_peft_folder(tmp_path, name="fr")
    stored = {name: (part.a.clone(), part.b.clone()) for name, part in adapter.modules.items()}
    layers = layers_for(qwen3())
    slots = AdapterSlots(layers)
    for _ in range(3):
        slot = slots.activate(adapter)
        torch.testing.assert_close(served(layers[NAMES[1]], slot), judged(model, 1))
        assert math.isclose(float(layers[NAMES[1]].w2_slots.scales[slot]), 10 / 3, rel_tol=1e-6)
        slots.evict("fr")
    for name, part in adapter.modules.items():
        assert torch.equal(part.a, stored[name][0])
        assert torch.equal(part.b, stored[name][1])


def test_peft_files_of_two_layouts_are_refused(tmp_path: Path) -> None:
    trained(Numbered(), tmp_path, **NUMBERED["plain"])
    stored = load_file(tmp_path / WEIGHTS)
    mixed = {key: t for key, t in stored.items() if f"{NAMES[1]}." not in key}
    for projection, side in ((p, s) for p in ("gate", "up", "down") for s in "AB"):
        mixed[f"base_model.model.{NAMES[1]}.{projection}_proj.lora_{side}.weight"] = torch.stack(
            [
                stored[f"base_model.model.{NAMES[1]}.{e}.{projection}_proj.lora_{side}.weight"]
                for e in range(EXPERTS)
            ]
        )
    save_file(mixed, tmp_path / WEIGHTS)
    with pytest.raises(AdapterError, match="same layout in all layers") as refused:
        read_peft_folder(tmp_path)
    assert f"{NAMES[0]}.0.down_proj: one module per expert" in str(refused.value)
    assert f"{NAMES[1]}.down_proj: experts stacked in one module" in str(refused.value)


@pytest.mark.parametrize(
    ("known", "listed"),
    [(True, "model.layers.1.mlp.experts.2.up_proj"), (False, "experts.2.up_proj")],
)
def test_an_expert_without_factors_is_refused_by_name(
    known: bool, listed: str, tmp_path: Path
) -> None:
    trained(Numbered(), tmp_path, **NUMBERED["plain"])
    stored = load_file(tmp_path / WEIGHTS)
    gone = f"{NAMES[1]}.2.up_proj."
    save_file({k: t for k, t in stored.items() if gone not in k}, tmp_path / WEIGHTS)
    adapter = read_peft_folder(tmp_path, name="fr")
    if not known:
        object.__setattr__(adapter, "targets", None)
    layers = layers_for(Numbered())
    with pytest.raises(AdapterError, match=r"(no|missing).* 1: " + listed):
        AdapterSlots(layers).activate(adapter)
    assert all(not layer.w13_slots.ranks.any() for layer in layers.values())


def test_an_expert_that_the_model_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    trained(Numbered(), tmp_path, **NUMBERED["one projection"])
    stored = load_file(tmp_path / WEIGHTS)
    for side in "AB":
        key = f"base_model.model.{NAMES[0]}.{{}}.up_proj.lora_{side}.weight"
        stored[key.format(EXPERTS)] = stored[key.format(0)].clone()
    save_file(stored, tmp_path / WEIGHTS)
    message = rf"does not serve, 1 of {LAYERS * EXPERTS + 1}: {NAMES[0]}.{EXPERTS}.up_proj"
    with pytest.raises(AdapterError, match=message):
        AdapterSlots(layers_for(Numbered())).activate(read_peft_folder(tmp_path))


def test_a_list_of_modules_that_cannot_reach_stacked_experts_is_no_missing_expert(
    tmp_path: Path,
) -> None:
    # vllm #47088: the names of the list stand for other modules of the model
    config = {"target_modules": [], "target_parameters": PARAMETERS[1:]}
    model = trained(qwen3(), tmp_path, **config)
    text = (tmp_path / "adapter_config.json").read_text()
    names = '"target_modules": ["gate_proj", "up_proj"]'
    text = text.replace('"target_modules": []', names)
    assert names in text
    (tmp_path / "adapter_config.json").write_text(text)
    assert_served(model, qwen3(), tmp_path, ExpertLayout.STACKED)


def test_names_of_experts_that_peft_turned_into_parameters_give_what_peft_gives(
    tmp_path: Path,
) -> None:
    names = ["gate_proj", "up_proj", "down_proj"]
    model = trained(qwen3(), tmp_path, target_modules=names)
    assert "lora_A" in "".join(dict(experts_of(model, 0).named_parameters()))
    assert_served(model, qwen3(), tmp_path, ExpertLayout.STACKED)


def test_one_batch_serves_several_adapters_as_peft_serves_each_alone(tmp_path: Path) -> None:
    names = ["gate_proj", "up_proj", "down_proj"]
    configs: list[dict[str, Any]] = [
        {"target_modules": [], "target_parameters": PARAMETERS},
        {"target_modules": names, "r": 2, "lora_alpha": 9},
    ]
    layers = layers_for(qwen3())
    slots, models = AdapterSlots(layers), {-1: qwen3()}
    for name, config in zip(("fr", "de"), configs, strict=True):
        model = trained(qwen3(), tmp_path / name, **config)
        models[slots.activate(read_peft_folder(tmp_path / name))] = model
    rows = [(0, -1, 1)[token % 3] for token in range(TOKENS)]
    for index, layer_name in enumerate(NAMES):
        alone = {slot: judged(model, index) for slot, model in models.items()}
        wanted = torch.stack([alone[slot][token] for token, slot in enumerate(rows)])
        out = served_batch(layers[layer_name], rows)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
