"""Verdicts of oracles, and the exit codes that they stand for. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    # the evidence does not allow a judgement, for instance an ill-conditioned reference
    INCONCLUSIVE = "inconclusive"
    SKIP = "skip"
    INFRA = "infra"


class Failure(StrEnum):
    """Kind of a FAIL or INFRA verdict."""

    WRONG_ANSWER = "wrong_answer"
    BASE_ROW_CHANGED = "base_row_changed"
    FOREIGN_MEMORY = "foreign_memory"
    NONDETERMINISTIC = "nondeterministic"
    NOT_EQUIVARIANT = "not_equivariant"
    STALE_STATE = "stale_state"
    REPLAY_DIFFERS = "replay_differs"
    NOT_ISOLATED = "not_isolated"
    BATCH_DEPENDENT = "batch_dependent"
    LATE_READ = "late_read"
    EXTRA_WORK = "extra_work"
    # two streams touch the same memory without an order
    RACE = "race"
    SCHEDULE_DEPENDENT = "schedule_dependent"
    # work that should run side by side cannot
    SERIALISED = "serialised"
    DEADLOCK = "deadlock"
    # of a step that a server repeats: what the host should not do in it
    HOST_WAIT = "host_wait"
    ALLOCATION = "allocation"
    MOVED_BUFFER = "moved_buffer"
    # a captured graph that does not hold what its replays need
    WRONG_GRAPH = "wrong_graph"
    NOT_REFUSED = "not_refused"
    RECOMPILED = "recompiled"
    RESOURCES_GREW = "resources_grew"
    # of an engine: less of something happened than the case asks for, such as drafts
    IDLE = "idle"
    # an engine that did not start, which says nothing about what it serves
    NOT_STARTED = "not_started"
    # what the subject answered is not what the protocol allows
    BROKEN_PROTOCOL = "broken_protocol"
    EXCEPTION = "exception"
    HANG = "hang"
    CRASH = "crash"
    CUDA_STICKY = "cuda_sticky"
    OUT_OF_MEMORY = "out_of_memory"
    # an exception in the harness's own code
    HARNESS = "harness_error"


class OracleName(StrEnum):
    REFERENCE = "reference"
    EXACT = "exact"
    BASE_ROWS = "base_rows"
    CANARY = "canary"
    REPEAT = "repeat"
    PERMUTE = "permute"
    SEQUENCE = "sequence"
    GUARD = "guard"
    COMPILE = "compile"
    ISOLATION = "isolation"
    RANGE = "range"
    WORK = "work"
    BATCH_INVARIANCE = "batch_invariance"
    QUEUE = "queue"
    GRAPH = "graph"
    RACE = "race"
    SCHEDULE = "schedule"
    OVERLAP = "overlap"
    HOT_PATH = "hot_path"
    INVENTORY = "inventory"
    TOKENS = "tokens"
    ENGINE_PROPERTIES = "engine_properties"
    LIVENESS = "liveness"


@dataclass(frozen=True, slots=True)
class Judgement:
    """One oracle's verdict with its evidence.

    `where` locates the worst element in the user's terms (slot, token, slice, column);
    `metrics` holds numbers (error, threshold, counts); `message` is one sentence that
    explains a verdict other than PASS, gives the reason of a SKIP, or says what a PASS did
    not look at.
    """

    oracle: OracleName
    verdict: Verdict
    failure: Failure | None = None
    message: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    where: Mapping[str, int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        needs_kind = self.verdict in (Verdict.FAIL, Verdict.INFRA)
        assert needs_kind == (self.failure is not None), f"{self.verdict} with {self.failure}"


class ExitCode(int, Enum):
    OK = 0
    WRONG = 1
    INCOMPLETE = 2
    INFRASTRUCTURE = 3
    USAGE = 4


EXIT_CODES: Mapping[Verdict, ExitCode] = {
    Verdict.PASS: ExitCode.OK,
    Verdict.FAIL: ExitCode.WRONG,
    Verdict.INFRA: ExitCode.INFRASTRUCTURE,
    Verdict.INCONCLUSIVE: ExitCode.INCOMPLETE,
    Verdict.SKIP: ExitCode.INCOMPLETE,
}

# worst first: one wrong result outweighs everything else
_SEVERITY = (Verdict.FAIL, Verdict.INFRA, Verdict.INCONCLUSIVE, Verdict.SKIP, Verdict.PASS)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a group; INCONCLUSIVE for an empty one, which has shown nothing."""
    found = set(verdicts)
    return next((v for v in _SEVERITY if v in found), Verdict.INCONCLUSIVE)
