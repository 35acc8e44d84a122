"""Layers with biases, with other activations than SiLU, and with gate and up in turn. The experts
of GPT-OSS and of Gemma 4 as transformers computes them are the reference, with adapters of PEFT."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels.adapters.peft_folder import read_peft_folder
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.layers.gate_up import GateUp, gate_and_up
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.layers.moe_partition import MoERank
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.layer.forms import MoEForm
from lorakernels.moe.layer.ops import run_experts
from lorakernels.moe.layer.types import Activation, Formula, RouterWeight
from lorakernels.moe.weights import ExpertFactors

transformers = pytest.importorskip("transformers")

EXPERTS, TOP_K, TOKENS, RANK = 4, 2, 6, 3
SLOTS = (0, -1, 0, 0, -1, 0)
NAME = "model.layers.0.mlp.experts"
OF_NO_GATE = ("up_proj", "down_proj")


def gpt_oss(hidden: int, intermediate: int) -> nn.Module:
    """A model of one layer, with weights so large that gate and up are clamped now and then."""
    config = transformers.GptOssConfig(
        vocab_size=32,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        pad_token_id=0,
    )
    model = transformers.GptOssForCausalLM._from_config(config, experts_implementation="eager")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in experts_of(model).parameters():
            parameter.normal_(std=1.0 if parameter.dim() == 3 else 3.0)
    return model


def experts_of(model: nn.Module) -> Any:
    return model.get_submodule("model.layers.0.mlp").experts


def layer_of(experts: Any, **options: Any) -> FusedMoELoRA:
    fields: dict[str, Any] = {"num_slots": 1, "rank": RANK} | options
    return FusedMoELoRA(
        # the input comes first in its weights
        experts.gate_up_proj.detach().mT,
        experts.down_proj.detach().mT,
        gate_up=GateUp.INTERLEAVED,
        w13_bias=experts.gate_up_proj_bias,
        w2_bias=experts.down_proj_bias,
        activation=Activation.SWIGLU_OAI,
        **fields,
    )


def routed(hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    x, scores = torch.randn(TOKENS, hidden), torch.randn(TOKENS, EXPERTS)
    weights, ids = torch.topk(scores.softmax(dim=-1), TOP_K)
    return x, ids, weights


def run(layer: FusedMoELoRA) -> Tensor:
    x, ids, weights = routed(layer.packing.hidden)
    sizes = {"max_tokens": TOKENS, "max_slots": layer.num_slots, "device": "cpu"}
    batch = BatchMetadata(**sizes)
    batch.prepare(torch.tensor(SLOTS, dtype=torch.int32))
    experts = layer.cut.experts.size
    pairs = PairMetadata(top_k=TOP_K, num_experts=experts, with_base=True, **sizes)
    scratch = MoEScratch([layer], max_tokens=TOKENS, top_k=TOP_K)
    out: Tensor = layer(x, ids.int(), weights, batch, pairs, scratch)
    return out


def judged(experts: Any, hidden: int) -> Tensor:
    x, ids, weights = routed(hidden)
    with torch.no_grad():
        out: Tensor = experts(x, ids, weights)
    return out


def by_slot(adapted: Tensor, plain: Tensor) -> Tensor:
    return torch.where(torch.tensor(SLOTS)[:, None] >= 0, adapted, plain)


@pytest.mark.parametrize(("hidden", "intermediate"), [(24, 10), (16, 16)])
@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 2)])
def test_a_layer_of_gpt_oss_with_an_adapter_of_peft_is_that_of_transformers(
    ep: int, tp: int, hidden: int, intermediate: int, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    plain, model = gpt_oss(hidden, intermediate), gpt_oss(hidden, intermediate)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=7,
        init_lora_weights=False,
        target_modules=[],
        target_parameters=parameters,
    )
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(tmp_path)
    wanted = judged(experts_of(wrapped.base_model.model), hidden)
    without = judged(experts_of(plain), hidden)
    assert not torch.allclose(wanted, without, rtol=0.1)
    adapter = read_peft_folder(tmp_path)
    parts = {f"experts.{m.rpartition('.')[2]}": f for m, f in adapter.modules.items()}
    total = torch.zeros(TOKENS, hidden)
    for ep_rank in range(ep):
        for tp_rank in range(tp):
            place = MoERank(ep, ep_rank, tp, tp_rank)
            layer = layer_of(experts_of(plain), place=place)
            layer.load_adapter(0, parts)
            total += run(layer)
    torch.testing.assert_close(total, by_slot(wanted, without), rtol=1e-4, atol=1e-4)


def test_both_sides_of_the_clamp_are_reached_by_the_weights_of_these_tests() -> None:
    experts = experts_of(gpt_oss(24, 10))
    x, ids, _ = routed(24)
    rows = [
        x[t] @ experts.gate_up_proj[e] + experts.gate_up_proj_bias[e]
        for t in range(TOKENS)
        for e in ids[t].tolist()
    ]
    gate, up = torch.stack(rows)[:, 0::2], torch.stack(rows)[:, 1::2]
    limit = Activation.SWIGLU_OAI.limit
    for values in (gate - limit, up - limit, -limit - up):
        assert 0 < (values > 0).sum() < values.numel() / 2


def test_a_layer_of_gemma_with_an_adapter_is_that_of_transformers() -> None:
    gemma = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    hidden, intermediate = 24, 10
    config = transformers.Gemma4TextConfig(
        hidden_size=hidden,
        num_experts=EXPERTS,
        top_k_experts=TOP_K,
        moe_intermediate_size=intermediate,
    )
    assert config.hidden_activation == "gelu_pytorch_tanh"
    experts = gemma.Gemma4TextExperts(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    layer = FusedMoELoRA(
        experts.gate_up_proj.detach().clone(),
        experts.down_proj.detach().clone(),
        gate_up=GateUp.HALVES,
        activation=Activation.GELU_TANH_GATED,
        num_slots=1,
        rank=RANK,
    )
    a, b = torch.randn(EXPERTS, RANK, hidden), torch.randn(EXPERTS, 2 * intermediate, RANK)
    layer.load_adapter(0, {"experts.gate_up_proj": ExpertFactors(a, b, 0.5)})
    without = judged(experts, hidden)
    with torch.no_grad():
        experts.gate_up_proj += 0.5 * b @ a
    wanted = by_slot(judged(experts, hidden), without)
    torch.testing.assert_close(run(layer), wanted, rtol=1e-4, atol=1e-4)


def activated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """act of one expert whose products are given numbers: w13 is the identity, w2 as well."""
    count = len(gate)
    pairs = PairMetadata(
        max_tokens=1, top_k=1, num_experts=1, max_slots=1, device="cpu", with_base=True
    )
    batch = BatchMetadata(max_tokens=1, max_slots=1, device="cpu")
    batch.prepare(torch.tensor([-1], dtype=torch.int32))
    pairs.prepare(torch.zeros(1, 1, dtype=torch.int32), batch)
    w13, w2 = torch.zeros(1, 2 * count, count), torch.eye(count)[None]
    layer = FusedMoELoRA(w13, w2, gate_up=GateUp.HALVES, num_slots=1, rank=1)
    buffers = MoEScratch([layer], max_tokens=1, top_k=1).buffers
    bias = torch.cat([gate, up])[None]
    out = torch.empty(1, count)
    run_experts(
        torch.zeros(1, count),
        w13,
        w2,
        torch.ones(1, 1),
        pairs,
        buffers,
        out,
        w13_bias=bias,
        activation=activation,
    )
    return buffers.act[0].clone()


@pytest.mark.parametrize("form", [None, *MoEForm])
def test_experts_without_adapters_may_stand_in_a_model_whose_rows_have_some(
    form: MoEForm | None,
) -> None:
    w13 = torch.randn(1, 8, 6, generator=torch.Generator().manual_seed(1))
    w2 = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(2))
    layer = FusedMoELoRA(w13, w2, gate_up=GateUp.HALVES, num_slots=1, rank=1)
    batch = BatchMetadata(max_tokens=2, max_slots=1, device="cpu")
    pairs = PairMetadata(
        max_tokens=2, top_k=1, num_experts=1, max_slots=1, device="cpu", with_base=True
    )
    found = []
    for slot in (-1, 0):
        batch.prepare(torch.tensor([slot, slot], dtype=torch.int32))
        pairs.prepare(torch.zeros(2, 1, dtype=torch.int32), batch)
        buffers = MoEScratch([layer], max_tokens=2, top_k=1).buffers
        out = torch.full((2, 6), float("nan"))
        run_experts(torch.ones(2, 6), w13, w2, torch.ones(2, 1), pairs, buffers, out, form=form)
        found.append(out)
    assert found[0].count_nonzero()
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("formula", Formula)
def test_the_kernel_has_each_formula_of_the_table(formula: Formula) -> None:
    constants = {"alpha": 1.5, "limit": 2.0} if formula is Formula.SWIGLU_OAI else {}
    gate, up = torch.tensor([0.5, 1.5]), torch.tensor([0.25, 1.0])
    found = activated(Activation(formula, **constants), gate, up)
    g = gate.double()
    wanted = {
        Formula.SILU: up * g / (1 + (-g).exp()),
        Formula.GELU_TANH: up * torch.nn.functional.gelu(g, approximate="tanh"),
        Formula.SWIGLU_OAI: (up + 1) * g / (1 + (-1.5 * g).exp()),
    }[formula]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_gate_is_clamped_from_above_and_up_from_both_sides() -> None:
    activation = Activation(Formula.SWIGLU_OAI, alpha=2.0, limit=3.0)
    gate = torch.tensor([-9.0, -1.0, 2.0, 9.0, 1.0, 1.0, 1.0])
    up = torch.tensor([1.0, 1.0, 1.0, 1.0, 9.0, -9.0, 0.5])
    g, u = gate.clamp(max=3.0), up.clamp(-3.0, 3.0)
    wanted = (u + 1) * g * torch.sigmoid(2.0 * g)
    torch.testing.assert_close(activated(activation, gate, up), wanted)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_nan_is_not_clamped_to_a_number() -> None:
    nan = float("nan")
    found = activated(
        Activation.SWIGLU_OAI, torch.tensor([nan, 1.0, 1.0]), torch.tensor([1.0, nan, 1.0])
    )
    assert found.isnan().tolist() == [True, True, False]


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("activation", [Activation.GELU_TANH_GATED, Activation.SWIGLU_OAI])
def test_large_gates_are_open_or_closed(activation: Activation) -> None:
    gate = torch.tensor([-1e30, -60.0, 60.0, 1e30])
    found = activated(activation, gate, torch.ones(4))
    top = 14.0 if activation is Activation.SWIGLU_OAI else 1e30
    wanted = torch.tensor([0.0, 0.0, min(60.0, top), top])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("alpha", "limit"), [(0.0, 7.0), (1.7, 0.0), (1.7, float("inf"))])
def test_constants_of_an_activation_are_positive_and_finite(alpha: float, limit: float) -> None:
    with pytest.raises(ValueError, match="of swiglu_oai must be positive and finite"):
        Activation(Formula.SWIGLU_OAI, alpha=alpha, limit=limit)


def test_the_order_of_rows_is_undone_by_nothing_else_than_itself() -> None:
    rows = torch.arange(12.0).view(1, 6, 2)
    gate, up = gate_and_up(rows, GateUp.INTERLEAVED)
    assert torch.equal(torch.stack([gate, up], dim=2).flatten(1, 2), rows)
    assert torch.equal(torch.cat(gate_and_up(rows, GateUp.HALVES), dim=1), rows)
    assert gate[0, :, 0].tolist() == [0.0, 4.0, 8.0]


def test_the_rows_of_a_usual_layer_are_halves_unless_it_is_told() -> None:
    w13 = torch.arange(72, dtype=torch.float32).view(3, 6, 4)
    w2 = torch.ones(3, 4, 3)
    layers = [
        FusedMoELoRA(w13, w2, num_slots=1, rank=2, gate_up=order)
        for order in (None, GateUp.HALVES, GateUp.INTERLEAVED)
    ]
    assert [layer.packing.gate_up for layer in layers[:2]] == [GateUp.HALVES] * 2
    assert torch.equal(layers[0].w13, w13)
    assert not torch.equal(layers[2].w13, w13)


W13, W2 = torch.ones(3, 12, 4), torch.ones(3, 4, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gate_up": None, "activation": Activation.SWIGLU_OAI},
            "gate_up must say how the rows of gate and up lie in a layer with biases or another",
        ),
        (
            {"gate_up": None, "w2_bias": torch.ones(3, 4)},
            "gate_up must say how the rows of gate and up lie in a layer with biases or another",
        ),
        (
            {"w13": W13[:, :6], "projections": OF_NO_GATE},
            "gate_up must be None without a gate (got HALVES)",
        ),
        (
            {
                "w13": W13[:, :6],
                "projections": OF_NO_GATE,
                "gate_up": None,
                "activation": Activation.SWIGLU_OAI,
            },
            "activation must be one without a gate, like projections",
        ),
        ({"activation": Activation.SILU}, "activation must be one with a gate, like projections"),
        ({"w13_bias": torch.ones(3, 6)}, "w13_bias must be [3, 12] in torch.float32 on cpu"),
        ({"w2_bias": torch.ones(3, 6)}, "w2_bias must be [3, 4] in torch.float32 on cpu"),
        ({"w2_bias": torch.ones(3, 4).half()}, "w2_bias must be [3, 4] in torch.float32 on cpu"),
        (
            {"w13_bias": torch.ones(3, 12, device="meta")},
            "w13_bias must be [3, 12] in torch.float32 on cpu",
        ),
        (
            {"w2_bias": torch.ones(3, 4), "router_weight": RouterWeight.ON_INPUT},
            "biases must be None with router weights on the input",
        ),
    ],
)
def test_what_a_layer_cannot_know_or_compute_is_refused(
    options: dict[str, Any], message: str
) -> None:
    fields = {"w13": W13, "w2": W2, "gate_up": GateUp.HALVES, "num_slots": 1, "rank": 1} | options
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        FusedMoELoRA(fields.pop("w13"), fields.pop("w2"), **fields)


def test_swiglu_of_gpt_oss_without_a_gate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^swiglu_oai must have a gate$"):
        Activation(Formula.SWIGLU_OAI, is_gated=False, alpha=1.0, limit=1.0)


def test_the_bias_of_down_is_on_one_tensor_parallel_rank_and_whole() -> None:
    bias = torch.arange(12.0).view(3, 4)
    ranks = [
        FusedMoELoRA(
            W13, W2, gate_up=GateUp.HALVES, w2_bias=bias, num_slots=1, rank=1,
            place=MoERank(tp_size=2, tp_rank=rank, ep_size=3, ep_rank=1),
        ).w2_bias
        for rank in range(2)
    ]  # fmt: skip
    assert ranks[0] is not None
    assert ranks[0].tolist() == [[4.0, 5.0, 6.0, 7.0]]
    assert ranks[1] is None


def test_the_bias_of_gate_and_up_is_cut_and_padded_like_their_rows() -> None:
    bias = torch.arange(36.0).view(3, 12)
    halves = [
        FusedMoELoRA(
            W13, W2, gate_up=GateUp.INTERLEAVED, w13_bias=bias, num_slots=1, rank=1,
            place=MoERank(tp_size=2, tp_rank=rank), padded_intermediate=8,
        ).w13_bias
        for rank in range(2)
    ]  # fmt: skip
    assert halves[0] is not None
    assert halves[1] is not None
    # gate is 0, 2, .., 10 of expert 0, up 1, 3, .., 11
    assert halves[0][0].tolist() == [0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]
    assert halves[1][0].tolist() == [8.0, 10.0, 0.0, 0.0, 9.0, 11.0, 0.0, 0.0]
