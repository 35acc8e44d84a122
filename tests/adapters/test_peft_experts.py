"""Files of stacked experts that must be refused, each with its place and what is allowed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lorakernels.adapters.errors import AdapterError
from lorakernels.adapters.peft_folder import read_peft_folder
from lorakernels.moe.weights import ExpertFactors

HOLDER = "model.layers.0.mlp.experts"
GATE_UP, DOWN = f"{HOLDER}.gate_up_proj", f"{HOLDER}.down_proj"
EXPERTS, RANK, HIDDEN, INTERMEDIATE = 3, 2, 8, 5


def pair(module: str, a: tuple[int, ...], b: tuple[int, ...]) -> dict[str, Tensor]:
    key = f"base_model.model.{module}.lora_"
    return {f"{key}A.weight": torch.randn(a), f"{key}B.weight": torch.randn(b)}


def gate_up(module: str = f"{HOLDER}.base_layer") -> dict[str, Tensor]:
    rows = EXPERTS * RANK
    return pair(module, (rows, HIDDEN), (2 * INTERMEDIATE, rows))


def down(module: str = HOLDER) -> dict[str, Tensor]:
    rows = EXPERTS * RANK
    return pair(module, (rows, INTERMEDIATE), (HIDDEN, rows))


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": []}
    fields["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def refused(folder: Path, message: str, file: str = "adapter_model.safetensors") -> None:
    with pytest.raises(AdapterError, match=f"^{re.escape(f'{folder / file}: {message}')}$"):
        read_peft_folder(folder)


def test_each_expert_gets_its_own_rows_of_a_and_its_own_columns_of_b(tmp_path: Path) -> None:
    # vllm #31534: one-hot in the experts, so that a wrong order of the axes moves them
    tensors = gate_up() | down()
    a = torch.arange(EXPERTS).repeat_interleave(RANK).float()
    b = torch.arange(EXPERTS).repeat(RANK).float()
    tensors[f"base_model.model.{HOLDER}.lora_A.weight"] = a[:, None].repeat(1, INTERMEDIATE)
    tensors[f"base_model.model.{HOLDER}.lora_B.weight"] = b.repeat(HIDDEN, 1)
    factors = read_peft_folder(write(tmp_path, tensors)).modules[DOWN]
    assert isinstance(factors, ExpertFactors)
    assert factors.a.shape == (EXPERTS, RANK, INTERMEDIATE)
    assert factors.b.shape == (EXPERTS, HIDDEN, RANK)
    assert factors.scale == 3.0
    for expert in range(EXPERTS):
        assert factors.a[expert].unique().tolist() == [expert]
        assert factors.b[expert].unique().tolist() == [expert]


@pytest.mark.parametrize("inner", ["gate_up", "down"])
def test_sizes_decide_which_wrapper_belongs_to_which_parameter(tmp_path: Path, inner: str) -> None:
    wrapped, outer = f"{HOLDER}.base_layer", HOLDER
    if inner == "gate_up":
        tensors = gate_up(wrapped) | down(outer)
    else:
        tensors = down(wrapped) | gate_up(outer)
    modules = read_peft_folder(write(tmp_path, tensors)).modules
    assert modules.keys() == {GATE_UP, DOWN}
    assert modules[GATE_UP].a.shape[-1] == HIDDEN
    assert modules[DOWN].a.shape[-1] == INTERMEDIATE


@pytest.mark.parametrize(("hidden", "intermediate"), [(8, 5), (300, 5), (8, 300), (300, 400)])
def test_sizes_that_fit_are_told_from_others_however_large_they_are(
    tmp_path: Path, hidden: int, intermediate: int
) -> None:
    rows = EXPERTS * RANK
    first = pair(f"{HOLDER}.base_layer", (rows, hidden), (2 * intermediate, rows))
    second = pair(HOLDER, (rows, intermediate), (hidden, rows))
    modules = read_peft_folder(write(tmp_path, first | second)).modules
    assert modules[GATE_UP].b.shape == (EXPERTS, 2 * intermediate, RANK)
    assert modules[DOWN].b.shape == (EXPERTS, hidden, RANK)


def test_parameters_of_experts_are_known_whatever_their_module_is_called(tmp_path: Path) -> None:
    holder = "model.layers.0.feed_forward.bank"
    tensors = gate_up(f"{holder}.base_layer") | down(holder)
    names = {"target_parameters": ["bank.gate_up_proj", "bank.down_proj"]}
    modules = read_peft_folder(write(tmp_path, tensors, **names)).modules
    assert modules.keys() == {f"{holder}.gate_up_proj", f"{holder}.down_proj"}
    assert all(isinstance(factors, ExpertFactors) for factors in modules.values())


@pytest.mark.parametrize("shared", [False, True])
def test_stacks_may_be_stored_with_their_axis_of_experts(tmp_path: Path, shared: bool) -> None:
    ones = 1 if shared else EXPERTS
    tensors = pair(GATE_UP, (ones, RANK, HIDDEN), (EXPERTS, 2 * INTERMEDIATE, RANK))
    tensors |= pair(DOWN, (EXPERTS, RANK, INTERMEDIATE), (ones, HIDDEN, RANK))
    names = {"target_modules": ["gate_up_proj", "down_proj"], "target_parameters": None}
    modules = read_peft_folder(write(tmp_path, tensors, **names)).modules
    assert torch.equal(modules[GATE_UP].a, tensors[f"base_model.model.{GATE_UP}.lora_A.weight"])
    assert torch.equal(modules[DOWN].b, tensors[f"base_model.model.{DOWN}.lora_B.weight"])


def test_a_parameter_that_is_no_projection_of_experts_is_refused(tmp_path: Path) -> None:
    tensors = pair("model.layers.0.mlp.gate", (RANK, HIDDEN), (EXPERTS, RANK))
    refused(
        write(tmp_path, tensors, target_parameters=["mlp.gate.weight"]),
        "model.layers.0.mlp.gate.weight cannot be served: of bare parameters, only gate_up_proj "
        "and down_proj of experts may have factors",
    )


def test_a_parameter_without_factors_is_refused(tmp_path: Path) -> None:
    refused(
        write(tmp_path, down()),
        f"{HOLDER} must have factors for down_proj and gate_up_proj, as target_parameters says "
        "(got 1 pairs)",
    )


def test_a_single_square_projection_is_refused_because_it_has_two_readings(
    tmp_path: Path,
) -> None:
    rows = EXPERTS * RANK
    refused(
        write(
            tmp_path,
            pair(HOLDER, (rows, HIDDEN), (HIDDEN, rows)),
            target_parameters=["experts.down_proj"],
        ),
        f"the input and the output of {DOWN} cannot be distinguished, both have {HIDDEN} features; "
        "adapt gate_up_proj and down_proj together",
    )


def test_sizes_that_are_not_those_of_gate_up_and_down_are_refused(tmp_path: Path) -> None:
    tensors = gate_up() | pair(HOLDER, (6, INTERMEDIATE), (HIDDEN + 1, 6))
    refused(
        write(tmp_path, tensors),
        f"the shapes of {HOLDER}.base_layer and {HOLDER} must be those of gate_up_proj and "
        "down_proj (got [6, 8], [10, 6], [6, 5], [9, 6])",
    )


def test_a_rank_that_does_not_divide_the_rows_of_the_stack_is_refused(tmp_path: Path) -> None:
    refused(
        write(tmp_path, gate_up() | down(), r=4),
        f"factors of {HOLDER}.base_layer must be [experts * 4, in] and [out, 4 * experts] "
        "(got [6, 8] and [10, 6])",
    )


def test_a_stack_with_an_axis_of_experts_on_one_side_only_is_refused(tmp_path: Path) -> None:
    tensors = pair(DOWN, (EXPERTS, RANK, INTERMEDIATE), (HIDDEN, EXPERTS * RANK))
    names = {"target_modules": ["down_proj"], "target_parameters": None}
    refused(
        write(tmp_path, tensors, **names),
        f"lora_B of {DOWN} must have the axis of experts in both factors or be flat in both "
        "(got shape [8, 6])",
    )


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 2, 5), (8, 2, 3)),
        ((3, 2, 5), (8, 6)),
        ((6, 5), (8, 2, 3)),
        ((6,), (8, 6)),
        ((6, 5), (6,)),
    ],
)
def test_factors_of_parameters_with_other_than_two_dimensions_are_refused(
    tmp_path: Path, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    refused(
        write(tmp_path, gate_up() | pair(HOLDER, a, b)),
        f"lora_A and lora_B of {HOLDER} must have two dimensions (got {list(a)} and {list(b)})",
    )


def test_a_stack_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    tensors = gate_up() | down()
    tensors[f"base_model.model.{HOLDER}.lora_B.weight"][1, 1] = float("nan")
    refused(
        write(tmp_path, tensors),
        f"lora_B of {DOWN} must be finite (got 1 values of NaN or Inf among 48)",
    )


def test_experts_that_the_config_does_not_target_are_refused(tmp_path: Path) -> None:
    tensors = pair(DOWN, (EXPERTS, RANK, INTERMEDIATE), (EXPERTS, HIDDEN, RANK))
    names = {"target_modules": ["down_prj"], "target_parameters": None}
    refused(
        write(tmp_path, tensors, **names),
        f"{DOWN} has factors, but target_modules of adapter_config.json does not name it; "
        "did you mean 'down_prj'?",
    )


@pytest.mark.parametrize("field", [{"use_dora": True}, {"bias": "lora_only"}, {"lora_bias": True}])
def test_experts_are_no_way_around_what_is_refused_elsewhere(
    tmp_path: Path, field: dict[str, Any]
) -> None:
    with pytest.raises(AdapterError, match=next(iter(field))):
        read_peft_folder(write(tmp_path, gate_up() | down(), **field))


def test_a_string_of_parameters_is_refused(tmp_path: Path) -> None:
    refused(
        write(tmp_path, gate_up() | down(), target_parameters="experts.down_proj"),
        "target_parameters must be a list of names (got 'experts.down_proj')",
        file="adapter_config.json",
    )
