"""Legs that run beside each other: none hides how another one ended, and all end together."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from loragate.core.child_process import Watch, Watched
from loragate.core.signals import ended_by_signals
from loragate.core.verdict import ExitCode, Judgement, OracleName, Verdict
from loragate.events.log import encode, read_events
from loragate.events.model import (
    HOST_LEG,
    CaseFinished,
    CaseStarted,
    Expected,
    HostTestFinished,
    LegFinished,
    LegStarted,
    RunStarted,
)
from loragate.matrix.case import Tier
from loragate.matrix.selection import Selection
from loragate.report.record import outcome
from loragate.report.summary import Summary
from loragate.run import gate as gate_module
from loragate.run.gate import Gate
from loragate.run.legs import GateSetup, Leg, Needs

pytestmark = pytest.mark.usefixtures("heeded_signals")

RUN = "r"
CORES = frozenset(os.sched_getaffinity(0))
# waits for a file in the current folder, and fails without it
AWAIT = """
import os, pathlib, subprocess, sys, time
def mark(name):
    pathlib.Path(name).touch()
def wait_for(name):
    deadline = time.monotonic() + 60
    while not pathlib.Path(name).exists():
        if time.monotonic() > deadline:
            sys.exit("never seen: " + name)
        time.sleep(0.02)
"""
# with a process of its own that ignores Ctrl-C, until somebody ends both; prints both numbers
SLEEP = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGINT, signal.default_int_handler)
print(os.getpid(), child.pid, flush=True)
try:
    {then}
    time.sleep(600)
except KeyboardInterrupt:
    print("cleaned up", flush=True)
"""


def leg(name: str, text: str, needs: Needs = Needs.CORES) -> Leg:
    return Leg(name, needs, (sys.executable, "-c", f"{AWAIT}\n{text}"))


RunLegs = Callable[..., tuple[Gate, Summary]]


@pytest.fixture
def run_legs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLegs:
    """Runs legs in an empty folder as a gate whose plan has one case, of the first leg."""
    monkeypatch.chdir(tmp_path)

    def run(*legs: Leg, spare: frozenset[int] = CORES) -> tuple[Gate, Summary]:
        selection = Selection(matrix=(), subjects=("a",), tier=Tier.SMOKE)
        setup = GateSetup(run=RUN, report=tmp_path / "report", selection=selection, has_gpu=True)
        case = Expected(leg=legs[0].name, subject="a", site="s", count=1, run_ids=("a.s.x",))
        plan = RunStarted(
            run=RUN,
            started_at="",
            tier=Tier.SMOKE,
            subjects=("a",),
            legs=tuple(leg.name for leg in legs),
            expected=(case,),
            machine={"device": "cuda"},
        )
        gate = Gate(setup, spare=spare)
        # as of a leg of host tests that has found some
        test = HostTestFinished(leg=HOST_LEG, test="t::a", verdict=Verdict.PASS, duration_s=0.1)
        return gate, gate.run((plan, *judged(), test), legs)

    return run


def judged() -> tuple[CaseStarted, CaseFinished]:
    """The one case of the plan, which passes."""
    start = CaseStarted(run_id="a.s.x", worker="gw0", draw=0, seed=1)
    end = CaseFinished(
        run_id="a.s.x",
        subject="a",
        site="s",
        draw=0,
        repeat=0,
        seed=1,
        worker="gw0",
        verdict=Verdict.PASS,
        judgements=(Judgement(OracleName.EXACT, Verdict.PASS),),
        duration_s=0.0,
        replay="",
    )
    return start, end


def ends(report: Path) -> dict[str, LegFinished]:
    events = read_events(report / "events.jsonl").events
    return {event.name: event for event in events if isinstance(event, LegFinished)}


def steps(report: Path) -> list[str]:
    """The starts and ends of legs, in the order of the events."""
    found = []
    for event in read_events(report / "events.jsonl").events:
        if isinstance(event, LegStarted):
            found.append(f"+{event.name}")
        elif isinstance(event, LegFinished):
            found.append(f"-{event.name}")
    return found


GPU = leg("gpu", "mark('gpu'); wait_for('host')", Needs.GPU)
COMPILE = leg("compile", "wait_for('gpu'); mark('compile')")
HOST = leg("host", "wait_for('compile'); mark('host')")


def test_a_leg_without_the_gpu_runs_while_the_cases_run(run_legs: RunLegs, tmp_path: Path) -> None:
    # the cases end only once both others have run, one after the other
    gate, summary = run_legs(GPU, COMPILE, HOST)
    assert summary.exit_code == ExitCode.OK, summary.reasons
    assert not gate.interrupted
    seen = steps(tmp_path / "report")
    assert seen[:4] == ["+gpu", "+compile", "-compile", "+host"]
    assert sorted(seen[4:]) == ["-gpu", "-host"]


def test_reports_and_records_list_the_legs_in_the_order_of_the_plan(
    run_legs: RunLegs, tmp_path: Path
) -> None:
    # until the other two have ended
    slow = "while open('report/events.jsonl').read().count('leg_finished') < 2: time.sleep(0.02)"
    _, summary = run_legs(leg("gpu", slow, Needs.GPU), leg("compile", ""), leg("host", ""))
    assert steps(tmp_path / "report")[-1] == "-gpu"
    assert [leg.name for leg in summary.legs] == ["gpu", "compile", "host"]
    assert [row["name"] for row in outcome(summary)["legs"]] == ["gpu", "compile", "host"]


def test_without_spare_cores_each_leg_begins_when_the_one_before_has_ended(
    run_legs: RunLegs, tmp_path: Path
) -> None:
    legs = (leg("gpu", "", Needs.GPU), leg("compile", ""), leg("host", ""))
    run_legs(*legs, spare=frozenset())
    assert steps(tmp_path / "report") == ["+gpu", "-gpu", "+compile", "-compile", "+host", "-host"]


def test_what_is_timed_begins_when_all_others_have_ended(run_legs: RunLegs, tmp_path: Path) -> None:
    timed = leg("speed", "", Needs.MACHINE)
    late = leg("host", "wait_for('gpu')")
    run_legs(leg("gpu", "mark('gpu')", Needs.GPU), timed, late)
    assert steps(tmp_path / "report")[-2:] == ["+speed", "-speed"]


def test_a_leg_beside_the_cases_is_kept_to_its_cores_and_the_cases_are_not(
    run_legs: RunLegs, tmp_path: Path
) -> None:
    shown = "print(sorted(os.sched_getaffinity(0)))"
    core = frozenset({max(CORES)})
    run_legs(leg("gpu", shown, Needs.GPU), leg("host", shown), spare=core)
    logs = {name: (tmp_path / f"report/logs/{name}.log").read_text() for name in ("gpu", "host")}
    assert logs == {"gpu": f"{sorted(CORES)}\n", "host": f"{sorted(core)}\n"}
    assert os.sched_getaffinity(0) == CORES


@pytest.mark.parametrize(
    ("text", "verdict", "exit_code"),
    [
        ("sys.exit(1)", Verdict.FAIL, ExitCode.WRONG),
        ("sys.exit(2)", Verdict.INCONCLUSIVE, ExitCode.INCOMPLETE),
        ("os.kill(os.getpid(), 9)", Verdict.INFRA, ExitCode.INFRASTRUCTURE),
    ],
)
def test_a_leg_beside_the_cases_that_does_not_pass_fails_the_gate_and_costs_no_other_leg(
    run_legs: RunLegs, tmp_path: Path, text: str, verdict: Verdict, exit_code: ExitCode
) -> None:
    bad = leg("compile", f"wait_for('gpu'); mark('compile'); {text}")
    _, summary = run_legs(GPU, bad, HOST)
    found = {name: end.verdict for name, end in ends(tmp_path / "report").items()}
    assert found == {"gpu": Verdict.PASS, "compile": verdict, "host": Verdict.PASS}
    assert summary.exit_code == exit_code


def test_a_leg_beside_the_cases_that_cannot_start_costs_no_other_leg_and_passes_no_gate(
    run_legs: RunLegs, tmp_path: Path
) -> None:
    missing = Leg("compile", Needs.CORES, (str(tmp_path / "nothing"),))
    gpu = leg("gpu", "wait_for('host')", Needs.GPU)
    _, summary = run_legs(gpu, missing, leg("host", "mark('host')"))
    assert ends(tmp_path / "report").keys() == {"gpu", "host"}
    assert summary.exit_code == ExitCode.INFRASTRUCTURE
    assert "No such file or directory" in " ".join(summary.reasons)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_all_legs_that_run_with_all_that_they_have_started(
    run_legs: RunLegs, tmp_path: Path, number: signal.Signals
) -> None:
    gpu = leg("gpu", SLEEP.format(then="mark('gpu')"), Needs.GPU)
    interrupt = f"wait_for('gpu'); os.kill(os.getppid(), {number})"
    both = (gpu, leg("compile", SLEEP.format(then=interrupt)))
    with ended_by_signals():
        gate, summary = run_legs(*both, leg("host", "mark('host')"))
    report = tmp_path / "report"
    assert gate.interrupted
    assert summary.exit_code == ExitCode.INCOMPLETE
    found = {name: (end.verdict, end.message) for name, end in ends(report).items()}
    assert found == dict.fromkeys(("gpu", "compile"), (Verdict.INCONCLUSIVE, "interrupted"))
    assert not (tmp_path / "host").exists()
    assert (report / "index.html").exists()
    logs = [(report / f"logs/{name}.log").read_text() for name in ("gpu", "compile")]
    assert [log.splitlines()[1:] for log in logs] == [["cleaned up"]] * 2
    assert not list(filter(is_alive, (int(pid) for log in logs for pid in log.split()[:2])))


class InterruptedAtAnEnd(Watch):
    """An interruption comes while what a leg has left behind is ended."""

    def _end(self, ended: Sequence[Watched]) -> bool:
        super()._end(ended)
        return True


def test_a_leg_that_was_over_when_an_interruption_came_ended_as_it_did(
    run_legs: RunLegs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "Watch", InterruptedAtAnEnd)
    gate, summary = run_legs(leg("gpu", "sys.exit(1)"), leg("host", ""), spare=frozenset())
    assert gate.interrupted
    found = {name: (end.verdict, end.exit_code) for name, end in ends(tmp_path / "report").items()}
    assert found == {"gpu": (Verdict.FAIL, 1)}
    assert summary.exit_code == ExitCode.WRONG


def test_a_leg_that_is_silent_too_long_is_stopped_and_the_other_one_goes_on(
    run_legs: RunLegs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "_PATIENCE_S", 0.5)
    # its log grows, and no case of it is charged with the end of the other leg
    talking = "while not os.path.exists('end'): print('.', flush=True); time.sleep(0.05)"
    gpu = leg("gpu", talking, Needs.GPU)
    _, summary = run_legs(gpu, leg("compile", "time.sleep(600)"), leg("host", "mark('end')"))
    found = {name: end.verdict for name, end in ends(tmp_path / "report").items()}
    assert found == {"gpu": Verdict.PASS, "compile": Verdict.INFRA, "host": Verdict.PASS}
    assert summary.exit_code == ExitCode.INFRASTRUCTURE


def test_a_case_of_a_leg_that_is_silent_too_long_says_that_its_leg_was_stopped(
    run_legs: RunLegs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "_PATIENCE_S", 0.5)
    line = encode(CaseStarted(run_id="a.s.x", worker="gw0", draw=1, seed=1), run=RUN)
    begin = f"open('report/events.jsonl', 'a').write({line!r} + chr(10))"
    run_legs(leg("gpu", f"{begin}; time.sleep(600)", Needs.GPU))
    events = read_events(tmp_path / "report" / "events.jsonl").events
    last = [event for event in events if isinstance(event, CaseFinished)][-1]
    assert (last.trial, last.verdict) == ((1, 0), Verdict.INCONCLUSIVE)
    assert last.message == "stopped after 0.5 s without a sign of life"


def is_alive(pid: int) -> bool:
    """Whether a process is more than a zombie 30 s from now."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        time.sleep(0.02)
    return True
