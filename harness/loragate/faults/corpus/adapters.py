"""Faults of reading PEFT folders, matching names and activating adapters."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_config = planting("lorakernels.adapters.peft_config", Group.ADAPTERS)
_targets = planting("lorakernels.adapters.peft_targets", Group.ADAPTERS)
_folder = planting("lorakernels.adapters.peft_folder", Group.ADAPTERS)
_binding = planting("lorakernels.adapters.binding", Group.ADAPTERS)
_slots = planting("lorakernels.adapters.slots", Group.ADAPTERS)

FAULTS = (
    _config(
        "scale-ignored",
        "return alpha / (math.sqrt(rank) if self.use_rslora else rank)",
        "return 1.0",
        source="peft #2489",
        why="The scale is lost, which does not show where alpha equals r.",
    ),
    _config(
        "rslora-ignored",
        "return alpha / (math.sqrt(rank) if self.use_rslora else rank)",
        "return alpha / rank",
        source="peft #2733",
        why="An rsLoRA adapter is scaled by alpha / r.",
    ),
    _config(
        "rslora-applied-twice",
        "return alpha / (math.sqrt(rank) if self.use_rslora else rank)",
        "return alpha / (rank**0.25 if self.use_rslora else rank)",
        source="peft #3449",
        why="The square root of rsLoRA is taken twice.",
    ),
    _config(
        "scale-of-default-rank",
        "        rank = self.rank_of(module)\n        return alpha",
        "        rank = self.rank\n        return alpha",
        source="peft #2733",
        why="A module with a rank of its own is scaled by the default rank.",
    ),
    _config(
        "alpha-pattern-ignored",
        'matching_pattern(self.alpha_pattern, module, f"{self.file}: alpha_pattern")',
        "None",
        source="peft #2733",
        why="A module with an alpha of its own gets the default one.",
    ),
    _targets(
        "pattern-matches-inside-a-name",
        'rf"(.*\\.)?({pattern})$"',
        "rf\"(.*)?({pattern.rpartition('.')[2]})$\"",
        source="own",
        why="A pattern for layer 1 also changes layer 11.",
    ),
    _folder(
        "scale-folded-while-reading",
        "    return LoRAFactors(a, b, config.scale_of(module))\n",
        "    scale = config.scale_of(module)\n    return LoRAFactors(a, b * scale, scale)\n",
        source="peft #3111",
        why="The file reader folds a scale in that the kernel applies as well.",
    ),
    _binding(
        "missing-modules-accepted",
        "    _refuse_missing(adapter, homes, layers, bound)\n    return bound\n",
        "    return bound\n",
        source="vllm #50252",
        why="An adapter that lacks a module it targets is served as the base model there.",
    ),
    _binding(
        "unmatched-modules-dropped",
        "    unmatched = adapter.modules.keys() - homes\n    if unmatched:\n",
        "    unmatched = adapter.modules.keys() - homes\n"
        "    adapter = Adapter(adapter.name, {})\n"
        "    if len(unmatched) == len(adapter.modules):\n",
        source="vllm #50252",
        why="Factors whose names match nothing are dropped silently.",
    ),
    _slots(
        "same-name-keeps-old-adapter",
        "        slot = self._free_slot() if before is None else before.slot\n",
        "        if before is not None:\n            return before.slot\n"
        "        slot = self._free_slot()\n",
        source="sglang #8263",
        why="A new adapter under a known name is never loaded.",
    ),
    _slots(
        "layers-checked-one-by-one",
        "            self._stage(adapter.name, name, parts)\n",
        "            staged = self._stage(adapter.name, name, parts)\n"
        "            if adapter.name in self._residents:\n"
        "                self._layers[name].commit(self.slot_of(adapter.name), staged)\n",
        source="own",
        why="A layer loads its part before the next one has checked its own.",
    ),
    _slots(
        "half-an-adapter-stays",
        "            self._undo(adapter.name, slot, before)\n            raise\n",
        "            raise\n",
        source="sglang #9084",
        why="A failed activation leaves the adapter in the layers before the failure.",
    ),
    _slots(
        "evicted-slot-leaks",
        "        del self._residents[name]\n",
        '        self._residents[f"{name} (evicted)"] = self._residents.pop(name)\n',
        source="sglang #25413",
        why="A slot is never freed, until there are none left.",
    ),
    _slots(
        "evicted-adapter-stays-in-slot",
        "            layer.unload(slot)\n",
        "            break\n",
        source="sglang #29874",
        why="The name is gone, but the weights still serve rows of the slot.",
    ),
    _slots(
        "slot-remembered-by-name",
        "        return self._residents[name].slot\n",
        "        memo = self.__dict__.setdefault('_memo', {})\n"
        "        return memo.setdefault(name, self._residents[name].slot)\n",
        source="own",
        why="An adapter that comes back into another slot is looked up in its first one.",
    ),
    _slots(
        "slot-0-taken-for-none",
        "            layer.unload(slot)\n",
        "            if slot:\n                layer.unload(slot)\n",
        source="own",
        why="Slot 0 counts as no slot, so its adapter is never emptied.",
    ),
    _targets(
        "last-of-two-patterns-wins",
        "(p for p in patterns if Expression(p, module_expression(p), place).match(module))",
        "(p for p in reversed([*patterns])\n"
        "         if Expression(p, module_expression(p), place).match(module))",
        source="own",
        why="Of two patterns that match a module, the last one in the file sets its rank.",
    ),
)
