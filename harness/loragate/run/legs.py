"""The legs of the gate: which of them a run has, their commands and expected results. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path

from loragate.compile_leg import BaselineError, expected_count
from loragate.core.checkout import data_root
from loragate.core.child_process import python_module
from loragate.core.verdict import EXIT_CODES, Verdict
from loragate.events.model import COMPILE_SITE, HOST_LEG, Expected, Note, ShardPart
from loragate.matrix.selection import Selection
from loragate.run.folder import EVENTS
from loragate.subjects.registry import SUBJECTS, RegisteredSubject

_LEG_VERDICTS: Mapping[int, Verdict] = {
    **{code.value: verdict for verdict, code in EXIT_CODES.items() if verdict is not Verdict.SKIP},
    # pytest's own: nothing was collected
    5: Verdict.INCONCLUSIVE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSetup:
    """What the legs of one run have in common."""

    run: str
    report: Path
    selection: Selection
    has_gpu: bool
    # the build that the benchmarks compare this one with; None if nothing is timed
    speed_against: str | None = None
    # the report that balances the shards
    durations: Path | None = None

    @property
    def registered(self) -> tuple[RegisteredSubject, ...]:
        """The selected subjects that come with the harness."""
        return tuple(SUBJECTS[name] for name in self.selection.subjects if name in SUBJECTS)


_CASES_ON_GPU = "gpu"


class Needs(Enum):
    """What a leg keeps busy, which decides what may run beside it (`schedule.py`)."""

    CORES = auto()
    GPU = auto()
    # it times what it runs
    MACHINE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class LegKind:
    """`expected`: results of the leg besides those of the cases, which the plan lists."""

    name: str
    needs: Needs
    applies: Callable[[GateSetup], bool]
    command: Callable[[GateSetup], tuple[str, ...]]
    expected: Callable[[GateSetup], Iterator[Expected]] = lambda setup: iter(())


@dataclass(frozen=True, slots=True)
class Leg:
    """A leg of one run."""

    name: str
    needs: Needs
    command: tuple[str, ...]
    expected: tuple[Expected, ...] = ()


def legs_of(setup: GateSetup) -> tuple[Leg, ...]:
    """The legs in the order of the report; the first one runs the cases. It is the only one
    where patterns select some of the cases: the others do not depend on a case. In a run of shards
    each of these is a leg of one shard."""
    shard = setup.selection.shard
    return _legs_of_shards(setup)[shard.index - 1 if shard else 0]


def other_shards(setup: GateSetup) -> tuple[ShardPart, ...]:
    """The other shards of the run, with what their legs deliver besides results of cases."""
    shard = setup.selection.shard
    if shard is None:
        return ()
    return tuple(
        ShardPart(
            index=index,
            legs=tuple(leg.name for leg in legs),
            expected=tuple(row for leg in legs for row in leg.expected),
        )
        for index, legs in enumerate(_legs_of_shards(setup), start=1)
        if index != shard.index
    )


def _legs_of_shards(setup: GateSetup) -> tuple[tuple[Leg, ...], ...]:
    cases, *others = _all_legs(setup)
    shard = setup.selection.shard
    if shard is None:
        return ((cases, *others),)
    named = {leg.name: leg for leg in others}
    return tuple((cases, *(named[name] for name in part)) for part in shard.leg_parts(tuple(named)))


def _all_legs(setup: GateSetup) -> tuple[Leg, ...]:
    applying = [kind for kind in LEGS if kind.applies(setup)]
    # a leg that was asked for by its own option runs all the same
    asked = [kind for kind in applying[1:] if kind in SPEED_LEGS]
    wanted = [*applying[:1], *asked] if setup.selection.patterns else applying
    return tuple(
        Leg(kind.name, kind.needs, kind.command(setup), tuple(kind.expected(setup)))
        for kind in wanted
    )


def verdict_of_exit(exit_code: int) -> Verdict:
    """The verdict that the exit code of a leg stands for; an unknown code means a broken leg."""
    return _LEG_VERDICTS.get(exit_code, Verdict.INFRA)


def _cases_command(setup: GateSetup) -> tuple[str, ...]:
    selection = setup.selection
    options: list[tuple[str, Sequence[object]]] = [
        ("run", [setup.run]),
        ("report", [setup.report]),
        ("tier", [selection.tier.value]),
        ("subject", selection.subjects),
        ("draw", selection.draws),
        ("repeats", [selection.repeats]),
        ("cases", selection.patterns),
        ("matrix", selection.matrix),
        ("shard", [selection.shard] if selection.shard else []),
        ("durations", [setup.durations] if setup.durations else []),
    ]
    arguments = [f"--loragate-{name}={value}" for name, values in options for value in values]
    # where hypothesis is installed its plugin takes a second for the summary of every session
    return (*_pytest("cases/test_cases.py"), "-p", "no:hypothesispytest", *arguments)


def _compiled_subjects(setup: GateSetup) -> list[str]:
    return [subject.name for subject in setup.registered if subject.launches]


def _compile_command(setup: GateSetup) -> tuple[str, ...]:
    run = (str(setup.report / EVENTS), setup.run, setup.selection.tier.value)
    arguments = (*run, *_compiled_subjects(setup))
    return python_module("loragate.compile_leg.process", *arguments)


def _expected_compilations(setup: GateSetup) -> Iterator[Expected]:
    try:
        count = expected_count()
    except BaselineError:
        # the leg itself reports that its baseline cannot be read
        return
    for subject in _compiled_subjects(setup):
        yield Expected(leg="compile", subject=subject, site=COMPILE_SITE, count=count)


def _host_tests(setup: GateSetup) -> list[str]:
    """Those that are there: a wheel brings none."""
    listed = [path for subject in setup.registered for path in subject.host_tests]
    return [path for path in listed if (data_root() / path).exists()]


def left_out(setup: GateSetup) -> Iterator[Note]:
    """What the gate of a checkout would check of the same subjects, and this one cannot."""
    found = _host_tests(setup)
    for subject in setup.registered:
        if not set(subject.host_tests) <= set(found):
            text = f"host tests of {subject.name} are part of a checkout and were not run"
            yield Note(text=text)


def _host_command(setup: GateSetup) -> tuple[str, ...]:
    # the plugin notes in the run what was skipped for lack of a package
    joined = (f"--loragate-run={setup.run}", f"--loragate-report={setup.report}")
    return (*_pytest(*_host_tests(setup)), "-p", "loragate.plugin.host_tests", *joined)


def _findings_command(setup: GateSetup) -> tuple[str, ...]:
    record = [f"--events={setup.report / EVENTS}", f"--run={setup.run}"]
    if setup.has_gpu:
        record.append(f"--after-leg={_CASES_ON_GPU}")
    return python_module("loragate", "findings", *record)


def _speed_command(kind: str, setup: GateSetup) -> tuple[str, ...]:
    options = {
        "--against": setup.speed_against,
        "--events": setup.report / EVENTS,
        "--run": setup.run,
    }
    given = (f"{name}={value}" for name, value in options.items())
    return python_module("loragate", "bench", kind, *given)


def _pytest(*paths: str) -> tuple[str, ...]:
    root = data_root()
    return python_module(
        "pytest",
        *(str(root / path) for path in paths),
        f"--rootdir={root}",
        f"--config-file={root / 'pyproject.toml'}",
        "--numprocesses=auto",
        "-p",
        "no:cacheprovider",
    )


SPEED_LEGS = tuple(
    LegKind(
        name=f"speed-{kind}",
        needs=Needs.MACHINE,
        applies=lambda setup: setup.speed_against is not None,
        command=partial(_speed_command, kind),
    )
    for kind in ("dense", "moe")
)

# cases first: they are what people wait for
LEGS = (
    LegKind(
        name=_CASES_ON_GPU,
        needs=Needs.GPU,
        applies=lambda setup: setup.has_gpu,
        command=_cases_command,
    ),
    LegKind(
        name="interpreter",
        needs=Needs.CORES,
        applies=lambda setup: not setup.has_gpu,
        command=_cases_command,
    ),
    LegKind(
        name="compile",
        needs=Needs.CORES,
        applies=lambda setup: bool(_compiled_subjects(setup)),
        command=_compile_command,
        expected=_expected_compilations,
    ),
    LegKind(
        name=HOST_LEG,
        # a few of its tests use the GPU, none of them much of it
        needs=Needs.CORES,
        applies=lambda setup: bool(_host_tests(setup)),
        command=_host_command,
    ),
    LegKind(
        name="findings",
        # beside the cases its probes use little of the GPU. Those that take 12 GiB, or may stop
        # what another process runs, wait until the cases have ended
        needs=Needs.CORES,
        # a listed finding that no longer reproduces must not stay listed
        applies=lambda setup: any(subject.findings for subject in setup.registered),
        command=_findings_command,
    ),
    # last: nothing else uses the GPU by then
    *SPEED_LEGS,
)
