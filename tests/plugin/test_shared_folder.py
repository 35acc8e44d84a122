"""Several runs and one folder of a report: each run is judged by its own events."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from loragate.core.verdict import ExitCode
from loragate.events.log import read_events
from loragate.events.model import RunStarted

pytestmark = pytest.mark.usefixtures("heeded_signals")

MATRICES = Path(__file__).parent / "misbehaving"
GOOD = f"--matrix={MATRICES / 'four_good.yaml'}"


def names_of_runs(report: Path) -> list[str]:
    return [e.run for e in read_events(report / "events.jsonl").events if isinstance(e, RunStarted)]


@pytest.fixture
def sleeping(tmp_path, sleeping_gate, wait_until_it_sleeps):
    """A gate in the middle of its run, in the folder `report`."""
    gate = sleeping_gate()
    wait_until_it_sleeps(tmp_path / "report" / "events.jsonl")
    return gate


@pytest.mark.drill(
    tried="A second gate in the report folder of one that still runs",
    exit_code=ExitCode.USAGE,
    kept="the first run, whole; the second names it and starts nothing",
)
def test_a_gate_refuses_the_folder_of_another_run_which_goes_on(
    tmp_path, sleeping, start_gate, drill
):
    (first,) = names_of_runs(tmp_path / "report")
    second = start_gate("--subject=torch", GOOD)
    output, _ = second.communicate(timeout=120)
    drill(second.returncode, output)
    assert f"{first} is writing there; wait for it, or name another" in output
    assert names_of_runs(tmp_path / "report") == [first]
    sleeping.send_signal(signal.SIGINT)
    output, _ = sleeping.communicate(timeout=60)
    # it is judged by its own cases: one passed, one was interrupted
    assert sleeping.returncode == ExitCode.INCOMPLETE, output
    assert "1 case inconclusive" in output


@pytest.mark.drill(
    tried="pytest with one case beside a gate, in the same report folder",
    exit_code=ExitCode.USAGE,
    kept="the run of the gate, whole",
)
def test_a_pytest_session_beside_a_gate_is_refused_and_the_gate_goes_on(
    tmp_path, sleeping, run_session, drill
):
    (first,) = names_of_runs(tmp_path / "report")
    case = "--loragate-cases=*tokens-21"
    beside = run_session(tmp_path / "report", case, matrix="four_good.yaml")
    drill(beside.exit_code, beside.output)
    assert f"{first} is writing there" in beside.output
    assert names_of_runs(tmp_path / "report") == [first]


def test_the_folder_of_a_gate_that_was_killed_is_free_again(tmp_path, sleeping, run_session):
    sleeping.kill()
    sleeping.wait()
    case = "--loragate-cases=*tokens-21"
    after = run_session(tmp_path / "report", case, matrix="four_good.yaml")
    assert after.exit_code == ExitCode.OK, after.output
    assert len(list((tmp_path / "report" / "previous").iterdir())) == 1


def test_a_run_is_not_judged_by_events_that_another_run_wrote_into_its_file(tmp_path, sleeping):
    events = tmp_path / "report" / "events.jsonl"
    (name,) = names_of_runs(tmp_path / "report")
    whole = events.read_text().replace(name, "foreign")
    with events.open("a") as file:
        file.write(whole)
    sleeping.send_signal(signal.SIGINT)
    output, _ = sleeping.communicate(timeout=60)
    assert sleeping.returncode == ExitCode.INCOMPLETE, output
    assert "of another run were left out" in output


def test_a_run_whose_events_were_replaced_by_those_of_another_run_does_not_pass(
    tmp_path, sleeping, run_session
):
    good = run_session(tmp_path / "good", matrix="four_good.yaml")
    assert good.exit_code == ExitCode.OK
    events = tmp_path / "report" / "events.jsonl"
    events.unlink()
    events.write_bytes((tmp_path / "good" / "events.jsonl").read_bytes())
    sleeping.send_signal(signal.SIGINT)
    output, _ = sleeping.communicate(timeout=60)
    assert sleeping.returncode == ExitCode.INCOMPLETE, output
    assert "no plan is recorded" in output


@pytest.mark.drill(
    tried="--report that names a file",
    exit_code=ExitCode.USAGE,
    kept="the file, untouched",
)
def test_a_file_in_the_place_of_the_report_folder_is_refused(tmp_path, start_gate, drill):
    (tmp_path / "taken").write_text("mine")
    gate = start_gate("--subject=torch", GOOD, "--report=taken")
    output, _ = gate.communicate(timeout=120)
    drill(gate.returncode, output)
    assert f"report folder {tmp_path / 'taken'}: there is a file in its place" in output
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_pytest_session_refuses_a_file_as_its_report(tmp_path, run_session):
    (tmp_path / "taken").write_text("mine")
    done = run_session(tmp_path / "taken", matrix="four_good.yaml")
    assert done.exit_code == ExitCode.USAGE, done.output
    assert "there is a file in its place" in done.output
