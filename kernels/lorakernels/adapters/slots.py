"""Which adapter is in which slot, for all layers of a model at once.

Invariant: an adapter is in the same slot of every layer or of none, and a name has one slot.
Each slot is either free or taken; none gets lost (sglang #29874). A load that fails takes nothing
away: what was resident before is resident after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.binding import Bound, bind
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


@dataclass(frozen=True, slots=True)
class _Resident:
    """`bound` is kept so that the adapter can be loaded again if its successor fails to load."""

    slot: int
    bound: Bound


class AdapterSlots:
    """The resident adapters of a model. `layers` maps module names to layers. The factors of
    a resident adapter are kept where they are, in general on the host."""

    def __init__(self, layers: Mapping[str, AdapterLayer]) -> None:
        counts = {layer.num_slots for layer in layers.values()}
        if len(counts) != 1:
            raise ValueError(f"layers must have one number of slots (got {sorted(counts)})")
        self._layers = dict(layers)
        self._residents: dict[str, _Resident] = {}
        self.num_slots = counts.pop()

    @property
    def names(self) -> tuple[str, ...]:
        """The resident adapters, oldest first."""
        return tuple(self._residents)

    def slot_of(self, name: str) -> int:
        """The slot of a resident adapter, for the metadata of a batch. AdapterError."""
        if name not in self._residents:
            resident = ", ".join(map(printable, self._residents)) or "none"
            raise AdapterError(
                f"adapter {printable(name)} is not resident (resident: {resident})"
                f"{hint(name, self._residents)}"
            )
        return self._residents[name].slot

    def activate(self, adapter: Adapter) -> int:
        """Load an adapter into every layer and return its slot.

        A resident adapter of the same name is replaced in its slot. Every layer checks its part
        before the first one is changed; an adapter that does not target a layer empties its
        slot there. The parts of at most two layers are on the device beside the slots. Raises
        AdapterError or ValueError with the resident adapters unchanged. What a layer raises while
        it is loaded is raised after the resident adapter of that name has been loaded again.
        """
        bound = bind(adapter, {name: layer.parts for name, layer in self._layers.items()})
        for name, parts in bound.items():
            self._stage(adapter.name, name, parts)
        before = self._residents.get(adapter.name)
        slot = self._free_slot() if before is None else before.slot
        try:
            self._load(adapter.name, slot, bound)
        except BaseException:
            self._undo(adapter.name, slot, before)
            raise
        self._residents[adapter.name] = _Resident(slot, bound)
        return slot

    def evict(self, name: str) -> None:
        """Empty an adapter's slot in every layer. AdapterError if it is not resident."""
        slot = self.slot_of(name)
        # first the name: a slot that a layer fails to empty is free all the same, because a load
        # empties it, and no row can ask for it until then
        del self._residents[name]
        self._empty(slot)

    def _load(self, name: str, slot: int, bound: Bound) -> None:
        for layer, parts in bound.items():
            # staged for the second time: all layers at once would not fit beside the slots
            self._layers[layer].commit(slot, self._stage(name, layer, parts))

    def _undo(self, name: str, slot: int, before: _Resident | None) -> None:
        """Put a slot back after a load that failed; half an adapter is worse than none."""
        if before is None:
            self._empty(slot)
            return
        try:
            self._load(name, slot, before.bound)
        except BaseException:
            self.evict(name)
            raise

    def _empty(self, slot: int) -> None:
        for layer in self._layers.values():
            layer.unload(slot)

    def _stage(self, adapter: str, layer: str, parts: Mapping[str, Factors]) -> Any:
        try:
            return self._layers[layer].stage(parts)
        except ValueError as bad:
            raise AdapterError(f"adapter {printable(adapter)} does not fit {layer}: {bad}") from bad

    def _free_slot(self) -> int:
        taken = {resident.slot for resident in self._residents.values()}
        free = [slot for slot in range(self.num_slots) if slot not in taken]
        if not free:
            names = ", ".join(map(printable, self._residents))
            raise AdapterError(f"all {self.num_slots} slots are taken by {names}; evict one first")
        return free[0]
