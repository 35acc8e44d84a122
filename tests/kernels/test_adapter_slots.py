from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.errors import AdapterError
from lorakernels.adapters.peft_targets import TargetRule
from lorakernels.adapters.slots import AdapterSlots
from lorakernels.dense.weights import LoRAFactors

QKV = {"q_proj": (0,), "k_proj": (1,), "v_proj": (2,), "qkv_proj": (0, 1, 2)}


@dataclass
class Layer:
    """Keeps what is in its slots; refuses ranks above `rank`."""

    parts: Mapping[str, tuple[int, ...]]
    num_slots: int = 2
    rank: int = 8
    content: dict[int, Any] = field(default_factory=dict)
    # whether every commit fails, or how many
    breaks: int = False
    sticks: bool = False
    error: type[BaseException] = RuntimeError

    def stage(self, parts: Mapping[str, LoRAFactors | None]) -> Any:
        for name, factors in parts.items():
            if factors is not None and factors.rank > self.rank:
                raise ValueError(f"rank of {name} must be 1 to {self.rank} (got {factors.rank})")
        return dict(parts)

    def commit(self, slot: int, staged: Any) -> None:
        if self.breaks:
            self.breaks -= self.breaks is not True
            raise self.error("device lost")
        self.content[slot] = staged

    def unload(self, slot: int) -> None:
        if self.sticks:
            raise RuntimeError("device lost")
        self.content.pop(slot, None)


class Staged(dict[str, Any]):
    """What a layer has staged; `alive` are those that somebody still holds."""

    alive: ClassVar[weakref.WeakSet[Staged]] = weakref.WeakSet()
    __hash__ = object.__hash__

    def __init__(self, parts: Mapping[str, Any]) -> None:
        super().__init__(parts)
        self.alive.add(self)


def model(num_layers: int = 2, num_slots: int = 2) -> dict[str, Layer]:
    layers = {}
    for index in range(num_layers):
        layers[f"layers.{index}.attn.qkv_proj"] = Layer(QKV, num_slots)
        layers[f"layers.{index}.attn.o_proj"] = Layer({"o_proj": (0,)}, num_slots)
    return layers


def adapter(
    name: str, *modules: str, rank: int = 2, targets: tuple[str, ...] | None = None
) -> Adapter:
    part = LoRAFactors(torch.ones(rank, 4), torch.ones(4, rank), 1.0)
    rule = None if targets is None else TargetRule(targets)
    return Adapter(name, dict.fromkeys(modules, part), rule)


def all_of(part: str, num_layers: int = 2) -> list[str]:
    return [f"layers.{index}.attn.{part}" for index in range(num_layers)]


def contents(layers: Mapping[str, Layer]) -> dict[str, dict[int, Any]]:
    return {name: dict(layer.content) for name, layer in layers.items()}


def refusal(slots: AdapterSlots, given: Adapter) -> str:
    with pytest.raises(AdapterError) as raised:
        slots.activate(given)
    return str(raised.value)


def test_an_adapter_is_in_the_same_slot_of_every_layer() -> None:
    layers = model()
    slots = AdapterSlots(layers)
    modules = [*all_of("q_proj"), *all_of("o_proj")]
    assert slots.activate(adapter("fr", *modules)) == 0
    assert slots.slot_of("fr") == 0
    for name, layer in layers.items():
        assert list(layer.content[0]) == (["q_proj"] if "qkv" in name else ["o_proj"])


def test_a_layer_that_the_adapter_does_not_target_is_emptied_in_its_slot() -> None:
    # sglang #8103: the successor adapts attention only
    layers = model()
    slots = AdapterSlots(layers)
    slots.activate(adapter("full", *all_of("q_proj"), *all_of("o_proj")))
    slots.evict("full")
    slots.activate(adapter("small", *all_of("q_proj")))
    assert layers["layers.1.attn.o_proj"].content == {0: {}}


def test_one_layer_that_refuses_leaves_every_layer_as_it_was() -> None:
    layers = model()
    layers["layers.1.attn.o_proj"].rank = 4
    slots = AdapterSlots(layers)
    slots.activate(adapter("old", *all_of("o_proj")))
    before = contents(layers)
    for name in ("new", "old"):
        assert refusal(slots, adapter(name, *all_of("o_proj"), rank=6)) == (
            f"adapter {name} does not fit layers.1.attn.o_proj: "
            "rank of o_proj must be 1 to 4 (got 6)"
        )
        assert contents(layers) == before
        assert slots.names == ("old",)


def test_a_load_that_fails_leaves_no_half_adapter() -> None:
    layers = model()
    slots = AdapterSlots(layers)
    slots.activate(adapter("kept", *all_of("q_proj")))
    before = contents(layers)
    layers["layers.1.attn.o_proj"].breaks = True
    with pytest.raises(RuntimeError, match="device lost"):
        slots.activate(adapter("new", *all_of("q_proj")))
    assert contents(layers) == before
    assert slots.names == ("kept",)
    layers["layers.1.attn.o_proj"].breaks = False
    assert slots.activate(adapter("new", *all_of("q_proj"))) == 1


# the resident adapter may be itself a replacement
@pytest.mark.parametrize("versions", [1, 2])
def test_a_replacement_that_fails_to_load_leaves_the_resident_adapter(versions: int) -> None:
    layers = model()
    slots = AdapterSlots(layers)
    for rank in range(1, versions + 1):
        slots.activate(adapter("rl", *all_of("q_proj"), *all_of("o_proj"), rank=rank))
    before = contents(layers)
    layers["layers.1.attn.o_proj"].breaks = 1
    with pytest.raises(RuntimeError, match="device lost"):
        slots.activate(adapter("rl", *all_of("q_proj"), rank=4))
    assert contents(layers) == before
    assert slots.slot_of("rl") == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_load_that_is_interrupted_leaves_no_half_adapter(error: type[BaseException]) -> None:
    layers = model()
    slots = AdapterSlots(layers)
    slots.activate(adapter("rl", *all_of("q_proj"), *all_of("o_proj")))
    before = contents(layers)
    last = layers["layers.1.attn.o_proj"]
    last.error = error
    for name in ("new", "rl"):
        last.breaks = 1
        with pytest.raises(error):
            slots.activate(adapter(name, *all_of("q_proj"), rank=4))
        assert contents(layers) == before
        assert slots.names == ("rl",)


def test_an_adapter_that_cannot_be_restored_is_gone_and_its_slot_is_free() -> None:
    layers = model()
    slots = AdapterSlots(layers)
    slots.activate(adapter("rl", *all_of("q_proj")))
    slots.activate(adapter("kept", *all_of("q_proj")))
    kept = {name: layer.content[1] for name, layer in layers.items()}
    layers["layers.1.attn.o_proj"].breaks = True
    with pytest.raises(RuntimeError, match="device lost"):
        slots.activate(adapter("rl", *all_of("q_proj"), rank=4))
    assert slots.names == ("kept",)
    assert contents(layers) == {name: {1: content} for name, content in kept.items()}
    layers["layers.1.attn.o_proj"].breaks = False
    assert slots.activate(adapter("new", *all_of("q_proj"))) == 0


def test_an_eviction_that_fails_frees_the_slot() -> None:
    layers = model(num_slots=1)
    slots = AdapterSlots(layers)
    slots.activate(adapter("old", *all_of("q_proj")))
    layers["layers.1.attn.o_proj"].sticks = True
    with pytest.raises(RuntimeError, match="device lost"):
        slots.evict("old")
    assert slots.names == ()
    assert slots.activate(adapter("new", *all_of("q_proj"))) == 0


def test_at_most_two_layers_are_staged_at_a_time() -> None:
    layers = model(num_layers=4)
    alive: list[int] = []

    class Counting(Layer):
        def stage(self, parts: Mapping[str, LoRAFactors | None]) -> Any:
            staged = Staged(parts)
            alive.append(len(Staged.alive))
            return staged

        def commit(self, slot: int, staged: Any) -> None:
            # a slot holds a copy of what was staged
            self.content[slot] = dict(staged)

    counting = {name: Counting(layer.parts) for name, layer in layers.items()}
    AdapterSlots(counting).activate(adapter("fr", *all_of("q_proj", 4)))
    assert max(alive) <= 2
    assert len(alive) > len(counting)


def test_a_name_that_is_loaded_again_is_replaced_in_its_slot() -> None:
    # sglang #8263, #29874: the old weights stay, or a slot leaks with each reload
    layers = model()
    slots = AdapterSlots(layers)
    slots.activate(adapter("other", *all_of("q_proj")))
    for rank in (2, 3, 4):
        assert slots.activate(adapter("rl", *all_of("q_proj"), rank=rank)) == 1
        content = layers["layers.0.attn.qkv_proj"].content
        assert content.keys() == {0, 1}
        assert content[1]["q_proj"].rank == rank
    assert slots.names == ("other", "rl")


def test_slots_are_conserved_over_many_loads_and_evictions() -> None:
    layers = model(num_slots=3)
    slots = AdapterSlots(layers)
    for step in range(20):
        name = f"a{step}"
        slots.activate(adapter(name, *all_of("q_proj")))
        if len(slots.names) == 3:
            slots.evict(slots.names[step % 3])
    taken = [slots.slot_of(name) for name in slots.names]
    assert len(set(taken)) == len(taken)
    for layer in layers.values():
        assert sorted(layer.content) == sorted(taken)
    for name in slots.names:
        slots.evict(name)
    assert [slots.activate(adapter(n, *all_of("q_proj"))) for n in ("x", "y", "z")] == [0, 1, 2]


def test_an_adapter_without_a_free_slot_is_refused_with_the_resident_ones() -> None:
    slots = AdapterSlots(model())
    slots.activate(adapter("de", *all_of("q_proj")))
    slots.activate(adapter("fr", *all_of("q_proj")))
    assert refusal(slots, adapter("it", *all_of("q_proj"))) == (
        "all 2 slots are taken by de, fr; evict one first"
    )
    assert slots.names == ("de", "fr")


def test_an_adapter_that_is_not_resident_is_refused_with_the_nearest_one() -> None:
    slots = AdapterSlots(model())
    slots.activate(adapter("french", *all_of("q_proj")))
    message = "adapter frensh is not resident (resident: french); did you mean 'french'?"
    for ask in (slots.slot_of, slots.evict):
        with pytest.raises(AdapterError, match=f"^{re.escape(message)}$"):
            ask("frensh")


def test_an_adapter_is_refused_where_none_is_resident() -> None:
    message = "adapter french is not resident (resident: none)"
    with pytest.raises(AdapterError, match=f"^{re.escape(message)}$"):
        AdapterSlots(model()).slot_of("french")


def test_an_adapter_whose_names_do_not_match_is_refused() -> None:
    # vllm #50252: it loads, binds nothing, and the base model is served
    layers = model()
    slots = AdapterSlots(layers)
    given = adapter("fr", *[f"model.{m}" for m in all_of("q_proj")])
    assert refusal(slots, given) == (
        "adapter fr has factors for modules that the model does not serve, 2 of 2: "
        "model.layers.0.attn.q_proj, model.layers.1.attn.q_proj; "
        "did you mean 'layers.0.attn.q_proj'?"
    )
    assert contents(layers) == {name: {} for name in layers}


def test_one_unmatched_module_among_many_is_refused() -> None:
    given = adapter("fr", *all_of("q_proj"), "lm_head")
    assert refusal(AdapterSlots(model()), given) == (
        "adapter fr has factors for modules that the model does not serve, 1 of 3: lm_head"
    )


def test_an_adapter_without_factors_is_refused() -> None:
    assert refusal(AdapterSlots(model()), adapter("fr")) == (
        "adapter fr has no factors: it would be the base model"
    )


def test_a_targeted_module_without_factors_is_refused() -> None:
    given = adapter("fr", "layers.0.attn.q_proj", targets=("q_proj",))
    assert refusal(AdapterSlots(model()), given) == (
        "adapter fr has no factors for modules that it targets, 1: "
        "layers.1.attn.q_proj; did you mean 'layers.0.attn.q_proj'?"
    )


@pytest.mark.parametrize("part", ["qkv_proj", "q_proj"])
def test_a_list_may_target_a_fused_module_and_its_slices(part: str) -> None:
    # one list serves many models; a model has one of the two
    slots = AdapterSlots(model())
    given = adapter("fr", *all_of(part), targets=("q_proj", "qkv_proj"))
    assert slots.activate(given) == 0


def test_the_listing_of_many_modules_is_cut_short() -> None:
    given = adapter("fr", *[f"visual.{i}" for i in range(6)])
    assert refusal(AdapterSlots(model()), given) == (
        "adapter fr has factors for modules that the model does not serve, 6 of 6: "
        "visual.0, visual.1, visual.2, visual.3 and 2 more"
    )


def test_layers_of_different_slot_counts_and_no_layers_are_refused() -> None:
    layers = model() | {"lm_head": Layer({"lm_head": (0,)}, num_slots=3)}
    with pytest.raises(
        ValueError, match=r"^layers must have one number of slots \(got \[2, 3\]\)$"
    ):
        AdapterSlots(layers)
    with pytest.raises(ValueError, match=r"^layers must have one number of slots \(got \[\]\)$"):
        AdapterSlots({})


def test_two_layers_that_serve_one_module_are_refused() -> None:
    layers = {"attn.a": Layer({"q_proj": (0,)}), "attn.b": Layer({"q_proj": (0,)})}
    message = re.escape("module attn.q_proj must be in one layer (got attn.a, attn.b)")
    with pytest.raises(ValueError, match=f"^{message}$"):
        AdapterSlots(layers).activate(adapter("fr", "attn.q_proj"))
