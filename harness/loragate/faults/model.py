"""Data model of the fault corpus. Pure; imports no torch.

A fault is one module, one exact piece of its text, one replacement: a mistake that could really be
made. Production code knows nothing of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from loragate.core.verdict import Failure, OracleName, Verdict


class Needs(StrEnum):
    """The least machine on which a fault shows."""

    CPU = "cpu"
    GPU = "gpu"


class Group(StrEnum):
    """Where a fault is planted; a row of the kill-rate table."""

    METADATA = "metadata"
    SHRINK = "shrink"
    EXPAND = "expand"
    HOST = "launch and operator"
    WEIGHTS = "slots of a layer"
    LAYER = "packed and parallel layer"
    STREAMS = "streams and their events"
    SERVING = "serving: graphs and what they read"
    DELTA_NET = "input of a gated delta net"
    ADAPTERS = "adapter files and activation"
    DECODER = "serving: decoder"
    DRAFTS = "serving: drafts"
    ALIGN = "MoE: alignment of pairs"
    MOE_TWO_KERNEL = "MoE: shrink and expand"
    MOE_FUSED = "MoE: one launch for both"
    MOE_HOST = "MoE: plan, launch, slots"
    MOE_LAYER = "MoE: whole layer and its parts"
    MOE_ADAPTERS = "MoE: adapter files"
    PLUG_IN = "plug-in of vLLM"


class Part(StrEnum):
    """A part of the gate; each executes items of one kind."""

    CASE = "case"
    HOST_TEST = "host test"
    LAUNCH = "compiled kernel"


@dataclass(frozen=True, slots=True, order=True)
class GateItem:
    """Something that a plain run of the gate executes.

    id: of a shipped case its id, of a host test what pytest calls it, with or without the
    parameters in brackets, of a launch of the compile leg its label.
    """

    part: Part
    id: str


@dataclass(frozen=True, slots=True)
class Killer:
    """An item of the gate that must detect a fault.

    by: of a case, the oracle that must detect it, or how the process that runs it must end; None
    for all other items.
    """

    item: GateItem
    by: OracleName | Failure | None = None

    def __post_init__(self) -> None:
        if (self.item.part is Part.CASE) is (self.by is None):
            needs = "must" if self.by is None else "cannot"
            raise ValueError(f"a killer that is a {self.item.part} {needs} name an oracle")

    @property
    def name(self) -> str:
        """As the results name what has detected a fault."""
        return self.item.id if self.by is None else self.by.value


@dataclass(frozen=True, slots=True)
class Edit:
    """In `module`, the only occurrence of `old` is replaced by `new`."""

    module: str
    old: str
    new: str

    def __post_init__(self) -> None:
        if not self.old.strip():
            raise ValueError(f"{self.module}: old must be a piece of its text (got {self.old!r})")
        if self.old == self.new:
            raise ValueError(f"{self.module}: new must differ from old (got {self.new!r})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A defect and what must detect it.

    source: where it was really seen, as "vllm #42120", or "own".
    why: what goes wrong, in one sentence.
    killers: each of them must detect the fault; other oracles of their cases may. Without any, the
    fault can be searched for killers and cannot be planted otherwise.
    only: its one killer must be the only one, so that without it the fault would survive.
    shown: cases that also run and need not detect it, so that `only` says something about their
    oracles.
    """

    name: str
    edit: Edit
    group: Group
    source: str
    why: str
    killers: tuple[Killer, ...] = ()
    shown: tuple[GateItem, ...] = ()
    needs: Needs = Needs.CPU
    only: bool = False

    def __post_init__(self) -> None:
        _require_name(self.name)
        if self.only and len(self.killers) > 1:
            raise ValueError(f"{self.name}: only goes with one killer (got {len(self.killers)})")

    @property
    def items(self) -> tuple[GateItem, ...]:
        """What is executed with the fault planted, each once."""
        return tuple(dict.fromkeys((*(killer.item for killer in self.killers), *self.shown)))

    @property
    def digest(self) -> str:
        """Changes with what must detect the fault, but not with the edit: a fault that follows a
        kernel to its new shape or module is the same fault."""
        killers = tuple((*_described([k.item]), k.by and k.by.value) for k in self.killers)
        return _digest(killers, _described(self.shown), self.needs.value, self.only)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """An edit that changes no behaviour, or no edit at all: all of `items` must pass."""

    name: str
    why: str
    items: tuple[GateItem, ...] = ()
    edit: Edit | None = None

    def __post_init__(self) -> None:
        _require_name(self.name)

    @property
    def digest(self) -> str:
        return _digest(_described(self.items))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What one judge reported in a planted process.

    judge: an oracle, the id of a host test or of a launch, or a test of the baseline suite.
    case: the id of the case that an oracle judged, else "".
    part: the part of the gate that it belongs to; None where no gate runs it.
    """

    judge: str
    case: str
    verdict: Verdict
    failure: Failure | None = None
    message: str = ""
    part: Part | None = None


class Fate(StrEnum):
    """What became of a planted fault, worst first."""

    # the text to replace is gone or the planted code cannot be imported: this proves nothing
    BROKEN = "broken"
    SURVIVED = "survived"
    # detected, but not by everything that must detect it
    MISSED = "missed"
    # needs a GPU, and this machine has none
    NOT_RUN = "not run"
    KILLED = "killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`killers`: everything that detected the fault. `message`: the evidence, or for a fate other
    than KILLED the reason."""

    name: str
    fate: Fate
    killers: tuple[str, ...] = ()
    sightings: tuple[Sighting, ...] = ()
    message: str = ""
    seconds: float = 0.0


def _described(items: Iterable[GateItem]) -> tuple[tuple[str, str], ...]:
    return tuple((item.part.value, item.id) for item in items)


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _require_name(name: str) -> None:
    plain = name.replace("-", "")
    if not (plain.isascii() and plain.isalnum() and name == name.lower()):
        raise ValueError(f"a name must be lower-case words joined by '-' (got {name!r})")
