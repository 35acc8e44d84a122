"""The legs of the gate: which there are on a machine, and the command of each. No torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loragate.compile_leg import BaselineError, expected_count
from loragate.compile_leg.leg import PROVIDERS
from loragate.core.checkout import project_root
from loragate.core.verdict import EXIT_CODES, Verdict
from loragate.events.model import COMPILE_SITE, Expected
from loragate.matrix.selection import Selection
from loragate.run.folder import EVENTS

COMPILE = "compile"
HOST = "host"
FINDINGS = "findings"
# tests of what the kernels' package does on the host: adapters, slots, slicing, plans
HOST_TESTS = ("tests/kernels", "tests/adapters", "tests/moe")
_HOST_SUBJECT = "lorakernels"
_FINDINGS_SUBJECT = "vllm"
_LEG_VERDICTS: Mapping[int, Verdict] = {
    **{code.value: verdict for verdict, code in EXIT_CODES.items() if verdict is not Verdict.SKIP},
    # pytest's own: nothing was collected
    5: Verdict.INCONCLUSIVE,
}


@dataclass(frozen=True, slots=True)
class Leg:
    name: str
    command: tuple[str, ...]


def cases_leg_name(*, has_gpu: bool) -> str:
    return "gpu" if has_gpu else "interpreter"


def make_legs(selection: Selection, *, run: str, report: Path, has_gpu: bool) -> tuple[Leg, ...]:
    """Cases first: they are what people wait for."""
    cases = Leg(cases_leg_name(has_gpu=has_gpu), _cases_command(selection, run, report))
    compiled = [subject for subject in selection.subjects if subject in PROVIDERS]
    legs = [cases]
    if compiled:
        command = _python("loragate.compile_leg.process", str(report / EVENTS), run, *compiled)
        legs.append(Leg(COMPILE, command))
    if _HOST_SUBJECT in selection.subjects:
        # says what was skipped for want of a package
        joined = (f"--loragate-run={run}", f"--loragate-report={report}")
        command = (*_pytest(*HOST_TESTS), "-p", "loragate.plugin.host_tests", *joined)
        legs.append(Leg(HOST, command))
    if _FINDINGS_SUBJECT in selection.subjects:
        # a listed finding that is gone must not stay listed
        record = (f"--events={report / EVENTS}", f"--run={run}")
        legs.append(Leg(FINDINGS, _python("loragate", "findings", *record)))
    return tuple(legs)


def owed_by_compiling(selection: Selection) -> tuple[Expected, ...]:
    """What the compile leg must deliver; nothing where no baseline can be read, which the leg
    itself will tell."""
    try:
        count = expected_count()
    except BaselineError:
        return ()
    return tuple(
        Expected(leg=COMPILE, subject=subject, site=COMPILE_SITE, count=count)
        for subject in selection.subjects
        if subject in PROVIDERS
    )


def verdict_of_exit(exit_code: int) -> Verdict:
    """What the exit code of a leg says; one that none of ours gives is a broken leg."""
    return _LEG_VERDICTS.get(exit_code, Verdict.INFRA)


def _cases_command(selection: Selection, run: str, report: Path) -> tuple[str, ...]:
    options: list[tuple[str, Sequence[object]]] = [
        ("run", [run]),
        ("report", [report]),
        ("tier", [selection.tier.value]),
        ("subject", selection.subjects),
        ("draw", selection.draws),
        ("repeats", [selection.repeats]),
        ("cases", selection.patterns),
        ("matrix", selection.matrix),
    ]
    arguments = [f"--loragate-{name}={value}" for name, values in options for value in values]
    return (*_pytest("cases/test_cases.py"), *arguments)


def _pytest(*paths: str) -> tuple[str, ...]:
    root = project_root()
    return _python(
        "pytest",
        *(str(root / path) for path in paths),
        f"--rootdir={root}",
        f"--config-file={root / 'pyproject.toml'}",
        "--numprocesses=auto",
        "-p",
        "no:cacheprovider",
    )


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)
