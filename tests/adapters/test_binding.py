"""Which modules of a model an adapter must have factors for, where the model has experts.

A model offers its experts one by one and stacked, and offers linear modules beside them.
"""

from __future__ import annotations

import re

import pytest
import torch

from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.binding import bind
from lorakernels.adapters.errors import AdapterError
from lorakernels.adapters.peft_targets import TargetRule
from lorakernels.dense.weights import LoRAFactors
from lorakernels.moe.weights import ExpertFactors, Factors

LAYERS = {
    "l.qkv_proj": {"q_proj": (0,)},
    "l.experts": {
        "experts.up_proj": (0, 1),
        "experts.down_proj": (2, 3),
        "experts.0.up_proj": (0,),
        "experts.1.up_proj": (1,),
        "experts.0.down_proj": (2,),
        "experts.1.down_proj": (3,),
    },
}
FLAT = LoRAFactors(torch.ones(1, 2), torch.ones(2, 1), 1.0)
STACK = ExpertFactors(torch.ones(2, 1, 2), torch.ones(2, 2, 1), 1.0)
SINGLE = {f"experts.{expert}.up_proj": FLAT for expert in (0, 1)}


def given(modules: dict[str, Factors], *targets: str, parameters: tuple[str, ...] = ()) -> Adapter:
    rule = TargetRule(targets, parameters=parameters)
    return Adapter("fr", {f"l.{name}": factors for name, factors in modules.items()}, rule)


@pytest.mark.parametrize(
    "adapter",
    [
        # names of experts alone are no reason to miss experts: they are parameters of the model
        given({"q_proj": FLAT}, "q_proj", "up_proj"),
        given({"q_proj": FLAT, **SINGLE}, "q_proj", "up_proj"),
        given({"q_proj": FLAT, "experts.up_proj": STACK}, "q_proj", "up_proj"),
        given({"experts.up_proj": STACK}, "none", parameters=("experts.up_proj",)),
        # a name of modules does not match a parameter
        given({"experts.up_proj": STACK}, "down_proj", parameters=("experts.up_proj",)),
    ],
)
def test_an_adapter_has_all_the_factors_that_it_targets(adapter: Adapter) -> None:
    bound = bind(adapter, LAYERS)
    found = {f"l.{part}" for parts in bound.values() for part in parts}
    assert bound.keys() == LAYERS.keys()
    assert found == adapter.modules.keys()


def test_a_name_of_parameters_alone_does_not_match_a_linear_module_of_this_name() -> None:
    layers = LAYERS | {"l.mlp.down_proj": {"mlp.down_proj": (0,)}}
    adapter = given({"experts.down_proj": STACK}, "none", parameters=("down_proj",))
    assert bind(adapter, layers)["l.experts"].keys() == {"experts.down_proj"}


@pytest.mark.parametrize(
    ("adapter", "missing"),
    [
        (given(SINGLE, "q_proj", "up_proj"), "l.q_proj"),
        (given({"experts.up_proj": STACK}, "q_proj", "up_proj"), "l.q_proj"),
        (given({"experts.0.up_proj": FLAT}, "up_proj"), "l.experts.1.up_proj"),
        (given({"experts.up_proj": STACK}, "up_proj", "down_proj"), "l.experts.down_proj"),
        (
            given(
                {"experts.up_proj": STACK},
                "none",
                parameters=("experts.up_proj", "experts.down_proj"),
            ),
            "l.experts.down_proj",
        ),
        # parameters of other modules are no reason to overlook one of the experts
        (
            given({"experts.0.up_proj": FLAT}, "up_proj", parameters=("shared.down_proj",)),
            "l.experts.1.up_proj",
        ),
    ],
)
def test_a_module_that_is_targeted_and_has_no_factors_is_refused(
    adapter: Adapter, missing: str
) -> None:
    message = f"adapter fr has no factors for modules that it targets, 1: {missing}"
    with pytest.raises(AdapterError, match=f"^{re.escape(message)}(;|$)"):
        bind(adapter, LAYERS)


NAMES = tuple(f"model.layers.{index}.self_attn.q_proj" for index in range(3))
EQUAL_LAYERS = {f"model.layers.{index}.self_attn.qkv_proj": {"q_proj": (0,)} for index in range(3)}


def rules_for(chosen: tuple[int, ...]) -> list[TargetRule]:
    """Each way of PEFT to say which of equal layers are targeted."""
    others = tuple(name for index, name in enumerate(NAMES) if index not in chosen)
    return [
        TargetRule(("q_proj",), layers=chosen),
        TargetRule(("q_proj",), exclude=others),
        TargetRule(tuple(NAMES[index] for index in chosen)),
        TargetRule(rf".*layers\.[{''.join(map(str, chosen))}]\..*q_proj"),
    ]


@pytest.mark.parametrize("chosen", [(0,), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("way", range(4))
def test_each_of_equal_layers_is_targeted_or_not_by_its_own_name(
    way: int, chosen: tuple[int, ...]
) -> None:
    rule, modules = rules_for(chosen)[way], {NAMES[index]: FLAT for index in chosen}
    bound = bind(Adapter("fr", modules, rule), EQUAL_LAYERS)
    assert [len(parts) for parts in bound.values()] == [int(i in chosen) for i in range(3)]
    last = NAMES[chosen[-1]]
    # another layer instead, which takes factors also where it is not targeted
    misplaced = modules | {NAMES[(chosen[-1] + 1) % 3]: FLAT}
    del misplaced[last]
    message = f"has no factors for modules that it targets, 1: {last}"
    with pytest.raises(AdapterError, match=re.escape(message)):
        bind(Adapter("fr", misplaced, rule), EQUAL_LAYERS)
