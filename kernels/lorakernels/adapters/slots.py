"""Which adapter is in which slot, for all layers of a model at once.

Invariant: an adapter is in the same slot of every layer or of none, and a name has one slot.
Each slot is either free or taken; none gets lost (sglang #29874).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.binding import bind
from lorakernels.adapters.errors import AdapterError, hint, printable
from lorakernels.moe.weights import Factors


class AdapterLayer(Protocol):
    """A layer that adapters are loaded into, such as LoRALinear or FusedMoELoRA."""

    @property
    def num_slots(self) -> int: ...

    @property
    def parts(self) -> Mapping[str, Collection[int]]:
        """The slices and fused modules that an adapter may have factors for, and the indices
        of the slices that each covers."""

    def stage(self, parts: Mapping[str, Factors | None]) -> Any:
        """Check an adapter and prepare it for `commit`, without changing anything. ValueError."""

    def commit(self, slot: int, staged: Any) -> None:
        """Replace the content of a slot with what `stage` returned."""

    def unload(self, slot: int) -> None:
        """Empty a slot."""


class AdapterSlots:
    """The resident adapters of a model. `layers` maps module names to layers."""

    def __init__(self, layers: Mapping[str, AdapterLayer]) -> None:
        counts = {layer.num_slots for layer in layers.values()}
        if len(counts) != 1:
            raise ValueError(f"layers must have one number of slots (got {sorted(counts)})")
        self._layers = dict(layers)
        self._slots: dict[str, int] = {}
        self.num_slots = counts.pop()

    @property
    def names(self) -> tuple[str, ...]:
        """The resident adapters, oldest first."""
        return tuple(self._slots)

    def slot_of(self, name: str) -> int:
        """The slot of a resident adapter, for the metadata of a batch. AdapterError."""
        if name not in self._slots:
            resident = ", ".join(map(printable, self._slots)) or "none"
            raise AdapterError(
                f"adapter {printable(name)} is not resident (resident: {resident})"
                f"{hint(name, self._slots)}"
            )
        return self._slots[name]

    def activate(self, adapter: Adapter) -> int:
        """Load an adapter into every layer and return its slot.

        A resident adapter of the same name is replaced in its slot. Every layer checks its part
        before the first one is changed; an adapter that does not target a layer empties its
        slot there. Raises AdapterError or ValueError with the resident adapters unchanged.
        """
        bound = bind(adapter, {name: layer.parts for name, layer in self._layers.items()})
        staged = {name: self._stage(adapter, name, parts) for name, parts in bound.items()}
        slot = self._slots.get(adapter.name)
        if slot is None:
            slot = self._free_slot()
        self._slots[adapter.name] = slot
        try:
            for name, layer in self._layers.items():
                layer.commit(slot, staged[name])
        except BaseException:
            # half an adapter is worse than none
            self.evict(adapter.name)
            raise
        return slot

    def evict(self, name: str) -> None:
        """Empty an adapter's slot in every layer. AdapterError if it is not resident."""
        slot = self.slot_of(name)
        for layer in self._layers.values():
            layer.unload(slot)
        del self._slots[name]

    def _stage(self, adapter: Adapter, layer: str, parts: Mapping[str, Factors]) -> Any:
        try:
            return self._layers[layer].stage(parts)
        except ValueError as bad:
            raise AdapterError(
                f"adapter {printable(adapter.name)} does not fit {layer}: {bad}"
            ) from bad

    def _free_slot(self) -> int:
        taken = set(self._slots.values())
        free = [slot for slot in range(self.num_slots) if slot not in taken]
        if not free:
            names = ", ".join(map(printable, self._slots))
            raise AdapterError(f"all {self.num_slots} slots are taken by {names}; evict one first")
        return free[0]
