"""Adapters in the slots of a small model: activated, evicted, reactivated, replaced, refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.errors import AdapterError
from lorakernels.adapters.slots import AdapterSlots
from lorakernels.dense.weights import LoRAFactors
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.partition import Slice

_IN, _SLOTS, _RANK = 4, 2, 3
_PARTS = {"up": 6, "down": 4}


def check_activation() -> str | None:
    for scene in (_again, _replaced, _refused, _half_committed, _loop):
        wrong = scene()
        if wrong is not None:
            return wrong
    return None


def _again() -> str | None:
    """Activated, evicted, activated: the same bits, and the adapter's own tensors untouched."""
    slots, layers = _model()
    adapter = _adapter("one", seed=1)
    before = [t.clone() for t in _tensors(adapter)]
    slots.activate(adapter)
    first = _state(layers)
    slots.evict("one")
    if any(bool(tensor.count_nonzero()) for tensor in _state(layers)):
        return "an evicted adapter is still in its slot"
    slots.activate(adapter)
    if not _equal(_state(layers), first):
        return "an adapter that was activated again is not what it was the first time"
    if not _equal(_tensors(adapter), before):
        return "activation changed the adapter's own tensors"
    return None


def _replaced() -> str | None:
    """Another adapter under the same name takes the place of the first."""
    slots, layers = _model()
    fresh, other_layers = _model()
    slots.activate(_adapter("one", seed=1))
    slots.activate(_adapter("one", seed=2))
    fresh.activate(_adapter("one", seed=2))
    same = _equal(_state(layers), _state(other_layers))
    return None if same else "the old adapter is served under the name of the new one"


def _refused() -> str | None:
    """An adapter that does not fit the second layer does not change the first one."""
    slots, layers = _model()
    slots.activate(_adapter("one", seed=1))
    before = _state(layers)
    too_high = {"up": _RANK, "down": _RANK + 1}
    wrong = expect_error(lambda: slots.activate(_adapter("one", seed=2, ranks=too_high)))
    if wrong is not None:
        return f"an adapter of too high a rank: {wrong}"
    if not _equal(_state(layers), before) or slots.names != ("one",):
        return "an adapter that was refused has changed what is resident"
    return None


def _half_committed() -> str | None:
    """A layer that fails while an adapter is activated leaves no part of it behind."""
    slots, layers = _model()

    def fail(slot: int, staged: Any) -> None:
        raise RuntimeError("out of memory")

    layers["down"].commit = fail  # type: ignore[method-assign]
    try:
        slots.activate(_adapter("one", seed=1))
    except RuntimeError:
        emptied = not any(bool(tensor.count_nonzero()) for tensor in _state(layers))
        return None if emptied and not slots.names else "half an adapter is resident"
    return "the exception of a failing layer was swallowed"


def _loop() -> str | None:
    """Slots are conserved however often adapters come and go."""
    slots, _ = _model()
    for turn in range(3 * _SLOTS):
        slots.activate(_adapter(f"turn{turn}", seed=turn))
        slots.evict(f"turn{turn}")
    taken = {slots.activate(_adapter(f"last{index}", seed=index)) for index in range(_SLOTS)}
    if taken != set(range(_SLOTS)):
        return f"{_SLOTS} adapters are in slots {sorted(taken)}"
    wrong = expect_error(lambda: slots.activate(_adapter("more", seed=9)))
    return f"one adapter more than there are slots: {wrong}" if wrong else None


def _model() -> tuple[AdapterSlots, dict[str, LoRALinear]]:
    layers = {
        name: LoRALinear(
            torch.zeros(width, _IN),
            slices=[Slice(f"{name}_proj", width)],
            num_slots=_SLOTS,
            rank=_RANK,
        )
        for name, width in _PARTS.items()
    }
    return AdapterSlots(layers), layers


def _adapter(name: str, *, seed: int, ranks: dict[str, int] | None = None) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    ranks = ranks or dict.fromkeys(_PARTS, _RANK)
    modules = {
        f"{part}_proj": LoRAFactors(
            torch.randn(ranks[part], _IN, generator=generator),
            torch.randn(width, ranks[part], generator=generator),
            # not 1, and no power of two: a scale that is folded in shows in the bits
            0.7 + seed,
        )
        for part, width in _PARTS.items()
    }
    return Adapter(name, modules)


def _tensors(adapter: Adapter) -> list[Tensor]:
    return [tensor for part in adapter.modules.values() for tensor in (part.a, part.b)]


def _state(layers: dict[str, LoRALinear]) -> list[Tensor]:
    slots = [layer.slots for layer in layers.values()]
    return [t.clone() for s in slots for t in (s.a, s.b, s.ranks, s.scales)]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def expect_error(call: Callable[[], object]) -> str | None:
    try:
        call()
    except AdapterError:
        return None
    except Exception as error:
        return f"{type(error).__name__} instead of AdapterError"
    return "it was accepted"
