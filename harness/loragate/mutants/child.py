"""Runs an order in the process of one mutant, which is a fork of the server.

It runs cases with the code that a worker of the gate uses, and host tests with pytest.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby
from pathlib import Path
from typing import IO

import psutil

from loragate.core.deadline import deadline, open_crash_file
from loragate.core.fork_server import settle
from loragate.core.verdict import Judgement, Verdict
from loragate.faults.planting import PACKAGE
from loragate.matrix.case import Case
from loragate.matrix.case_run import CaseRun
from loragate.mutants import tracing
from loragate.mutants.host_tests import (
    COLLECTION,
    SelectedTests,
    TracedTests,
    ended_well,
    run_tests,
)
from loragate.mutants.planting import SUBJECT, planted_package
from loragate.mutants.units import IMPORT, Ended, Kind, Order, Transcript, Unit

Cases = Mapping[str, Case]


def run_order(order: Order, cases: Cases) -> None:
    """Run the units of `order`; `cases` are all there are, by run id."""
    root = Path(order.root)
    cache = order.cache or str(root / "cache")
    settle(log=order.log, folder=root, packages=root / "kernels", cache=cache)
    transcript = Transcript(Path(order.transcript))
    if order.traces:
        transcript.begin(IMPORT)
        _trace_all(order, cases, transcript, root)
    else:
        # before anything is announced, since a failure of it is none of the mutant
        known = frozenset(Path(order.known).read_text(encoding="utf-8").splitlines())
        with open_crash_file(root / "stacks.txt") as stacks:
            transcript.begin(IMPORT)
            _import(root)
            _run_units(order, cases, known, transcript, stacks)
    transcript.finish()


def limit_memory() -> None:
    """A mutant that asks for more than half of the machine's memory gets an error."""
    most = psutil.Process().memory_info().vms + psutil.virtual_memory().total // 2
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _import(root: Path) -> None:
    package = importlib.import_module(PACKAGE)
    home = Path(str(package.__file__)).resolve()
    assert home.is_relative_to(root.resolve()), f"the planted copy is not {home}"
    # as the gate does before any case or test
    importlib.import_module("loragate.subjects.lorakernels.subject")


def _run_units(
    order: Order, cases: Cases, known: frozenset[str], transcript: Transcript, stacks: IO[bytes]
) -> None:
    """Ends with the first unit that would fail the gate."""
    root = Path(order.root)
    for kind, group in groupby(order.units, key=lambda unit: unit.kind):
        units = list(group)
        if kind is Kind.TEST:
            deadlines = {unit.name: unit.deadline_s(order.least_deadline_s) for unit in units}
            plugin = SelectedTests(
                deadlines, order.least_deadline_s, known, transcript, stacks, root
            )
            plugin.conclude(run_tests(_files(units, root), root, plugin))
            if plugin.failed:
                return
            continue
        for unit in units:
            transcript.begin(unit.name)
            with deadline(unit.deadline_s(order.least_deadline_s), stacks):
                ended = _run_case(unit.name, cases[unit.name])
            transcript.end(ended)
            if ended.fails_gate:
                return


def _files(units: Sequence[Unit], root: Path) -> list[Path]:
    names = dict.fromkeys(unit.name.partition("::")[0] for unit in units)
    return [root / name for name in names]


def _run_case(name: str, case: Case) -> Ended:
    """The first judgement of the case that fails the gate, or its worst verdict."""
    from loragate.run.trial import open_trial, run_trial, verdict_of

    begin = time.monotonic()
    trial = open_trial(CaseRun(SUBJECT, case))
    if isinstance(trial, str):
        return Ended(unit=name, verdict=Verdict.SKIP, message=trial)
    judgements: list[Judgement] = []
    for oracle in case.oracles:
        judgements += run_trial(replace(trial, case=replace(case, oracles=(oracle,))))
        last = judgements[-1]
        ended = Ended(
            unit=name,
            verdict=last.verdict,
            judge=last.oracle.value,
            kind=last.failure.value if last.failure else "",
            message=last.message,
            seconds=time.monotonic() - begin,
        )
        if ended.fails_gate:
            return ended
    return Ended(unit=name, verdict=verdict_of(judgements), seconds=time.monotonic() - begin)


def _trace_all(order: Order, cases: Cases, transcript: Transcript, root: Path) -> None:
    """Run each unit in a fork, so that no cache of an earlier unit hides what a unit reaches."""
    folder = Path(order.traces)
    numbers = count()
    tracing.prepare_processes(folder / "site", planted_package(root))

    def trace(name: str) -> str:
        # the number of the process, because forks count on from the same number
        path = folder / f"{os.getpid()}-{next(numbers)}.txt"
        tracing.start(path)
        if name.startswith(COLLECTION) or name == IMPORT:
            transcript.end(Ended(unit=name, verdict=Verdict.PASS, trace=str(path)))
        return str(path)

    trace(IMPORT)
    _import(root)
    for module in _modules():
        _import_module(module)
    for unit in order.units:
        _in_a_fork(lambda unit=unit: _trace_case(unit, cases, transcript, trace))  # type: ignore[misc]
    if order.tests:
        plugin = TracedTests(transcript, root, trace)
        code = run_tests([root / name for name in order.tests], root, plugin)
        assert ended_well(code), f"pytest ended with exit code {int(code)}"


def _modules() -> Iterator[str]:
    package = importlib.import_module(PACKAGE)
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        yield module.name


def _import_module(module: str) -> None:
    """A module of the package, if the libraries are there that it needs."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        # without an extra, such as vllm, no unit reaches it either
        if (error.name or "").partition(".")[0] == PACKAGE:
            raise


def _trace_case(
    unit: Unit, cases: Cases, transcript: Transcript, trace: Callable[[str], str]
) -> None:
    path = trace(unit.name)
    transcript.end(replace(_run_case(unit.name, cases[unit.name]), trace=path))


def _in_a_fork(work: Callable[[], None]) -> None:
    process = os.fork()
    if process:
        os.waitpid(process, 0)
        return
    try:
        work()
    finally:
        os._exit(0)
