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
from loragate.matrix.case import Case
from loragate.matrix.ids import case_id


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
    ADAPTERS = "adapter files and activation"
    ALIGN = "MoE: alignment of pairs"
    MOE_TWO_KERNEL = "MoE: shrink and expand"
    MOE_FUSED = "MoE: one launch for both"
    MOE_HOST = "MoE: plan, launch, slots"
    MOE_LAYER = "MoE: whole layer and its parts"
    MOE_ADAPTERS = "MoE: adapter files"


class Check(StrEnum):
    """A check of host logic that no case of the matrix reaches; see checks/.

    Only the corpus runs these: what nothing but a check detects is not detected by the gate.
    """

    METADATA = "metadata_tables"
    DUMMY_RUN = "dummy_run"
    WORKSPACE = "workspace_size"
    FAR_ROWS = "far_rows"
    QUEUED_STEPS = "queued_steps"
    LAUNCH_ORDER = "launch_order"
    PARTITION = "partition"
    PACKING = "packing"
    ACTIVATION = "activation"
    PEFT_SCALE = "peft_scale"
    BINDING = "binding"
    COMPILES = "kernels_compile"
    PAIRS = "pair_tables"
    PAIR_PLANS = "pair_plans"
    FAR_PAIRS = "far_pairs"
    PAIR_WORKSPACE = "pair_workspace"
    PAIR_ORDER = "pair_launch_order"
    EXPERT_COMPILES = "expert_kernels_compile"
    EXPERT_LAYER = "expert_layer"
    EXPERT_QUANTISED = "expert_layer_quantised"
    EXPERT_RANKS = "expert_layer_over_ranks"
    EXPERT_SLOTS = "expert_slots"
    EXPERT_FILES = "expert_files"


# a planted process may also be expected to raise, to hang or to crash
Killer = OracleName | Check | Failure


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
    killers: each of them must detect the fault; others may.
    only: its one killer must be the only one, so that without it the fault would survive.
    """

    name: str
    edit: Edit
    group: Group
    source: str
    why: str
    killers: tuple[Killer, ...]
    cases: tuple[Case, ...] = ()
    checks: tuple[Check, ...] = ()
    needs: Needs = Needs.CPU
    only: bool = False

    def __post_init__(self) -> None:
        _require_name(self.name)
        if not self.killers:
            raise ValueError(f"{self.name}: killers must name at least one oracle or check")
        if self.only and len(self.killers) != 1:
            raise ValueError(f"{self.name}: only goes with one killer (got {len(self.killers)})")
        if not 1 <= len(self.cases) + len(self.checks) <= 3:
            count = len(self.cases) + len(self.checks)
            raise ValueError(f"{self.name}: cases and checks must be 1 to 3 (got {count})")
        _require_oracle(self.cases, self.name)
        for killer in self.killers:
            if isinstance(killer, Check) and killer not in self.checks:
                raise ValueError(f"{self.name}: killer {killer} is not among its checks")
            judged = {oracle for case in self.cases for oracle in case.oracles}
            if isinstance(killer, OracleName) and killer not in judged:
                raise ValueError(f"{self.name}: killer {killer} judges none of its cases")

    @property
    def digest(self) -> str:
        """Changes with the cases and with what must detect the fault, but not with the edit: a
        fault that follows a kernel to its new shape or module is the same fault."""
        killers, checks = _values(self.killers), _values(self.checks)
        return _digest(killers, _described(self.cases), checks, self.needs.value, self.only)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """An edit that changes no behaviour, or no edit at all: everything must pass."""

    name: str
    why: str
    cases: tuple[Case, ...]
    checks: tuple[Check, ...] = ()
    edit: Edit | None = None

    def __post_init__(self) -> None:
        _require_name(self.name)
        _require_oracle(self.cases, self.name)

    @property
    def digest(self) -> str:
        return _digest(_described(self.cases), _values(self.checks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What one judge reported in a planted process.

    judge: an oracle, a check, or a test of the baseline suite.
    case: the id of the case that an oracle judged, else "".
    """

    judge: str
    case: str
    verdict: Verdict
    failure: Failure | None = None
    message: str = ""


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


def _described(cases: tuple[Case, ...]) -> tuple[object, ...]:
    """Cases by their ids, which a new axis with its default value does not change."""
    return tuple((case_id(case), _values(case.oracles)) for case in cases)


def _values(members: Iterable[StrEnum]) -> tuple[str, ...]:
    return tuple(member.value for member in members)


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _require_name(name: str) -> None:
    plain = name.replace("-", "")
    if not (plain.isascii() and plain.isalnum() and name == name.lower()):
        raise ValueError(f"a name must be lower-case words joined by '-' (got {name!r})")


def _require_oracle(cases: tuple[Case, ...], name: str) -> None:
    for case in cases:
        if not case.oracles:
            raise ValueError(f"{name}: a case must name at least one oracle")
