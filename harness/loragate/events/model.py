"""What happened in a run, one JSON record a line: every report is made from these events alone.

Records are only ever appended, so that a killed process loses at most the line it was writing.
A record is an envelope (schema, kind, run) around one event. A new field gets a default, so that
older records stay readable; a field that is renamed gets a new schema and a step in `upgrade.py`.
Records of a kind that this version does not know are counted and left out.
Pure; imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loragate.core.checkout import Tree
from loragate.core.resources import Resources
from loragate.core.verdict import Failure, Judgement, Verdict
from loragate.findings.ledger import Finding
from loragate.matrix.case import Tier

SCHEMA = 2

# site of the rows that count compiled kernels: compiling is not an operation of a subject
COMPILE_SITE = "compile"
# the leg of ordinary tests
HOST_LEG = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How many results a leg has to deliver for one site of one subject.

    `run_ids` names them (as `loragate.matrix.ids.run_id`). It is empty for compile results, which
    have no run id and whose site is COMPILE_SITE.
    """

    leg: str
    subject: str
    site: str
    count: int
    run_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert not self.run_ids or len(set(self.run_ids)) == self.count, (
            f"{self.leg}/{self.subject}/{self.site}: {self.count} expected, "
            f"{len(set(self.run_ids))} different run ids"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A case that the plan left out, with the reason. It is not among the expected cases."""

    run_id: str
    subject: str
    site: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPart:
    """What one shard has to deliver, see RunStarted."""

    index: int
    legs: tuple[str, ...]
    expected: tuple[Expected, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The run is part `index` of `count`, counted from 1; `others` are the other parts."""

    index: int
    count: int
    others: tuple[ShardPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The plan. `started_at` is ISO 8601 in UTC; `legs` are all the legs that must finish.

    Every expected run id has to run `repeats` times with each of `draws`, but for those of `once`,
    of which the first trial is all; `draws` is empty if the plan does not say which. `patterns`
    have selected some of the cases, all of which are of the files `matrix`, if there are any.
    `shard` is None for a run that is no part of another one. `judged` is a digest of how the cases
    of the whole plan are judged, "" if the plan does not say.
    """

    run: str
    started_at: str
    tier: Tier
    subjects: tuple[str, ...]
    legs: tuple[str, ...]
    expected: tuple[Expected, ...]
    skipped: tuple[Skipped, ...] = ()
    draws: tuple[int, ...] = ()
    repeats: int = 1
    patterns: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    matrix: tuple[str, ...] = ()
    commit: str = ""
    tree: Tree = Tree.UNKNOWN
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    shard: Sharding | None = None
    judged: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegStarted:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LegFinished:
    """End of one process of the gate. `log_path` is relative to the report folder."""

    name: str
    verdict: Verdict
    exit_code: int
    duration_s: float
    log_path: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseStarted:
    """Written before the case runs: a start without an end is a crash.

    `replay` is the command that runs the same data again; earlier events do not have it.
    """

    run_id: str
    worker: str
    draw: int
    seed: int
    repeat: int = 0
    replay: str = ""

    @property
    def trial(self) -> tuple[int, int]:
        """Draw and repeat: what distinguishes the runs of one case."""
        return self.draw, self.repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFinished:
    """One run of one case of one subject.

    `failure` and `message` report what no oracle could: a hang, a crash, an exception, too little
    memory. `gpu` is the device that the worker was pinned to, "" on a CPU. `replay` is the command
    that runs the same data again.
    """

    run_id: str
    subject: str
    site: str
    draw: int
    seed: int
    worker: str
    verdict: Verdict
    judgements: tuple[Judgement, ...]
    duration_s: float
    replay: str
    repeat: int = 0
    gpu: str = ""
    failure: Failure | None = None
    message: str = ""

    @property
    def trial(self) -> tuple[int, int]:
        """Draw and repeat: what distinguishes the runs of one case."""
        return self.draw, self.repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """One specialisation of one kernel for one architecture, for instance "sm_90".

    `resources` is None if it did not compile, `baseline` is None if none is recorded. What is
    unchanged since the baseline need not be `compiled`; its resources are the recorded ones.
    """

    subject: str
    kernel: str
    specialisation: str
    arch: str
    verdict: Verdict
    resources: Resources | None = None
    baseline: Resources | None = None
    compiled: bool = True
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTestsCollected:
    """Ordinary tests of a leg, as pytest's node ids: each of them has to end."""

    leg: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTestFinished:
    """An ordinary test of a leg, or a module of tests that could not be collected.

    `message` is the first line of the error, or the reason of a skip, and `place` the file and line
    where it was raised. `detail` is the traceback, `output` what the test has printed, `rerun` the
    command that runs it again in the root of the project; these are empty for a test that passed.
    """

    leg: str
    test: str
    verdict: Verdict
    duration_s: float
    message: str = ""
    place: str = ""
    detail: str = ""
    output: str = ""
    rerun: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that the reader of the report should know."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFinding:
    """A finding that the ledger lists about cases of a subject of this run, and the version of the
    package that it is about, "" if it is not installed. It is recorded so that a later ledger does
    not change the verdict of this run."""

    finding: Finding
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """The run came to its end, whatever its verdict. A run without this event was killed."""

    finished_at: str
    duration_s: float


Event = (
    RunStarted
    | LegStarted
    | LegFinished
    | CaseStarted
    | CaseFinished
    | CompileResult
    | HostTestsCollected
    | HostTestFinished
    | Note
    | KnownFinding
    | RunFinished
)
