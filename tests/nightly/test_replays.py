"""A scan finds what is planted and names its cause, and the command that its page prints for a
finding shows again what it saw."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from loragate.cli import main
from loragate.core.verdict import ExitCode
from loragate.history import Outcome, Purpose, ScanRun, TrialRecord, open_history
from loragate.matrix.ids import run_id
from loragate.matrix.load import load_cases
from loragate.nightly.conditions import PLAIN, Cause, Clock, Conditions, Memory
from loragate.nightly.diagnosis import diagnose
from loragate.nightly.morning import morning
from loragate.nightly.pages.summary import render_markdown
from loragate.nightly.replays import replay_of_diagnosis, replay_of_trial, times_to_show
from loragate.nightly.states import Status, states
from loragate.nightly.suspects import Cell, Diagnosis, Sighting, Suspect
from loragate.scan.investigate import record_of

NewTrial = Callable[..., TrialRecord]

_PLANTED = Path(__file__).parent / "planted"
_ROOT = Path(__file__).parents[2]
_COMMAND = str(_ROOT / "ci" / "loragate")
_MODULE = "planted_subjects"
_CAUSES = {
    "Atomics": Cause.RUN_TO_RUN,
    "Uninitialised": Cause.MEMORY,
    "Order": Cause.ORDER,
    "Neighbour": Cause.NEIGHBOUR,
    "Timed": Cause.CLOCK,
}


def _loragate(*arguments: str) -> list[str]:
    """What ./ci/loragate becomes in the end."""
    return [sys.executable, "-m", "loragate", *arguments]


@pytest.fixture(scope="module")
def shell(environment: None) -> Iterator[None]:
    """In which whoever reads the page pastes a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORAGATE_PYTHON", sys.executable)
        patch.setenv("LORAGATE_COMMAND", _COMMAND)
        yield


@pytest.fixture(scope="module")
def scanned(shell: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a scan that was stopped once it knew all causes."""
    folder = tmp_path_factory.mktemp("scan")
    command = _loragate(
        *("scan", "--budget=20m", "--workers=2", "--cases=tokens-3", "--cases=Order.tokens-5"),
        *(f"--subject={_MODULE}:{subject}" for subject in (*_CAUSES, "Stable")),
        f"--matrix={_PLANTED / 'planted.yaml'}",
        *(f"--history={folder / 'h.db'}", f"--report={folder / 'report'}"),
    )
    scan = subprocess.Popen(
        command,
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # also where whoever started the tests ignores the signal
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        said = _until_all_are_known(scan, folder / "h.db")
    finally:
        scan.kill()
        scan.wait()
    assert scan.returncode == ExitCode.INCOMPLETE.value, said
    return folder


@pytest.fixture(scope="module")
def printed(scanned: Path) -> dict[str, str]:
    """The commands of the page, by subject."""
    page = (scanned / "report" / "morning.md").read_text(encoding="utf-8")
    commands = re.findall(r"^  - replay ` (.*) `$", page, re.MULTILINE)
    return {match[1]: line for line in commands if (match := re.search(r"replay \w+:(\w+)", line))}


def _until_all_are_known(scan: subprocess.Popen[str], history: Path) -> str:
    """What a scan says up to its end, which comes when each cause is known, and one of them by the
    oracles: the first ones are found by their bits."""
    assert scan.stdout is not None
    left, heard = set(_CAUSES), []
    for line in scan.stdout:
        heard.append(line)
        left -= {name for name in left if f":{name}." in line and f": {_CAUSES[name]}: " in line}
        if not left and any(t.cause and t.measure == "judged" for t in _trials(history)):
            break
    scan.send_signal(signal.SIGINT)
    rest, _ = scan.communicate(timeout=240)
    return "".join(heard) + rest


def _trials(path: Path) -> list[TrialRecord]:
    with open_history(path) as history:
        return list(history.trials())


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )


def test_five_kinds_of_nondeterminism_are_found_and_named_beside_what_is_stable(
    scanned: Path,
) -> None:
    with open_history(scanned / "h.db") as history:
        trials, runs = list(history.trials()), history.runs()
    causes = {trial.subject: trial.cause for trial in reversed(trials) if trial.cause}
    assert causes == {f"{_MODULE}:{name}": cause for name, cause in _CAUSES.items()}
    status = {
        state.key.path.split()[0].removeprefix(f"{_MODULE}:"): state.status
        for state in states(trials, runs).values()
    }
    # it depends on the time that the others take whether enough is known of this one
    assert status.pop("Stable") in (Status.UNDECIDED, Status.STABLE)
    # a wrong answer is never called flaky
    assert status == {**dict.fromkeys(_CAUSES, Status.FLAKY), "Order": Status.WRONG}
    order = next(t for t in trials if t.subject.endswith("Order") and t.cause)
    assert "tokens-5" in order.conditions["after"]
    page = morning(runs, trials, today=date.today())
    assert page.exit_code is ExitCode.WRONG
    assert {finding.cause for finding in page.findings} == {str(c) for c in _CAUSES.values()}


@pytest.mark.parametrize("subject", _CAUSES)
def test_the_printed_command_shows_the_flake(subject: str, printed: dict[str, str]) -> None:
    words = shlex.split(printed[subject])
    arguments = words[words.index(_COMMAND) + 1 :]
    # the variables before it are those of this environment
    assert all("=" in word for word in words[: -len(arguments) - 1])
    flake = _run(_loragate(*arguments))
    assert flake.returncode == ExitCode.WRONG, printed[subject] + flake.stdout


def test_what_shows_a_flake_leaves_a_stable_subject_alone(printed: dict[str, str]) -> None:
    # with the trial that pollutes before, which is one of the stable subject as well
    line = printed["Order"].replace(":Order.", ":Stable.")
    # as whoever reads the page does
    stable = _run(["bash", "-c", line])
    assert stable.returncode == ExitCode.OK, stable.stdout
    assert "the same in" in stable.stdout


def _replayed(*arguments: str) -> subprocess.CompletedProcess[str]:
    matrix = f"--matrix={_PLANTED / 'planted.yaml'}"
    return _run(_loragate("replay", *arguments, matrix))


@pytest.mark.usefixtures("shell")
def test_each_trial_says_what_it_has_shown_and_in_which_process() -> None:
    done = _replayed(f"{_MODULE}:Stable.tokens-3", "--neighbours=1", "--times=2", "--memory=zeros")
    assert done.returncode == ExitCode.OK, done.stdout
    head, *lines, last = done.stdout.splitlines()
    assert head.endswith("tokens-3#0 (bits): memory zeros, neighbours 1")
    names, _, digests = zip(*(line.rpartition(": right ") for line in lines), strict=True)
    assert names == (
        "nothing varied",
        *(f"trial {number}, process {process}" for number in (1, 2) for process in (1, 2)),
    )
    assert len(set(digests)) == 1
    assert last == "the same in 5 trials"


@pytest.mark.usefixtures("shell")
def test_a_result_that_all_trials_share_is_compared_with_that_of_the_case_alone() -> None:
    before = f"--after={_MODULE}:Order.tokens-5"
    done = _replayed(f"{_MODULE}:Order.tokens-3", before, "--times=2")
    assert done.returncode == ExitCode.WRONG, done.stdout
    _, alone, trial, last = done.stdout.splitlines()
    assert alone.startswith("nothing varied: right ")
    assert trial.startswith("trial 1: right ")
    assert last == "2 results in 2 trials of the same inputs"


@pytest.mark.usefixtures("shell")
def test_bits_that_nobody_promises_to_be_equal_are_no_failure() -> None:
    done = _replayed(f"{_MODULE}:Unpromised.tokens-3", "--times=4")
    assert done.returncode == ExitCode.OK, done.stdout
    assert "different nondeterministic" in done.stdout
    assert "no equal bits are promised, and nothing is wrong in 4 trials" in done.stdout


@pytest.mark.usefixtures("shell")
def test_a_replay_in_which_the_case_never_ran_is_not_right() -> None:
    before = f"--after={_MODULE}:Crashing.tokens-4"
    done = _replayed(f"{_MODULE}:Crashing.tokens-3", before, "--times=1")
    assert done.returncode == ExitCode.INCOMPLETE, done.stdout
    assert "trial 1: what ran before ended the process" in done.stdout


@pytest.mark.usefixtures("shell")
def test_a_replay_of_a_subject_that_is_not_there_is_not_right() -> None:
    done = _replayed(f"{_MODULE}:Nobody.tokens-3", "--times=1")
    assert done.returncode == ExitCode.INFRASTRUCTURE, done.stdout
    assert "has no 'Nobody'" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cache cold", "--cache cold needs a GPU, and none is visible"),
        ("--schedule delayed", "--schedule delayed needs a GPU, and none is visible"),
        ("--gpu 0", "--gpu 0 needs a GPU, and none is visible"),
        ("--after other.tokens-9", "'other.tokens-9' selects none of"),
        (
            "--times 2 --in-process",
            "--times takes fresh processes (--times N of them), and no --in",
        ),
        (
            "--clock plain --repeats 3",
            "--clock takes fresh processes (--times N of them), and no r",
        ),
    ],
)
def test_what_cannot_be_varied_is_refused(
    options: str, message: str, shell: None, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = f"--matrix={_PLANTED / 'planted.yaml'}"
    code = main(["replay", f"{_MODULE}:Stable.tokens-3", *options.split(), matrix])
    said = capsys.readouterr().err
    assert (code, message in said) == (ExitCode.USAGE, True), said


def test_a_whole_model_has_no_bits_to_replay(
    shell: None, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = load_cases((_ROOT / "cases" / "engine.yaml",))
    (name, *_) = (run_id("transformers", case) for case in cases)
    assert main(["replay", name, "--measure=bits"]) == ExitCode.USAGE
    assert "is judged by its oracles alone: use --measure judged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "tried", "times"), [(8, 8, 2), (1, 2, 7), (2, 12, 26), (1, 16, 72)]
)
def test_so_many_trials_are_made_that_a_flake_of_that_rate_stays_hidden_once_in_a_hundred(
    changed: int, tried: int, times: int
) -> None:
    assert times_to_show(changed, tried) == times
    rate = min(changed / tried, 0.9)
    assert (1 - rate) ** times <= 0.01 < (1 - rate) ** (times - 1)


def _diagnosed(cause: Cause, conditions: Conditions, *before: str) -> Diagnosis:
    cell = Cell(conditions=conditions, before=before)
    return Diagnosis(cause=cause, explanation="why", cell=cell, changed=4, tried=8)


_SEEN = "loragate replay some"


@pytest.mark.parametrize(
    ("diagnosis", "options"),
    [
        (_diagnosed(Cause.RUN_TO_RUN, PLAIN), ""),
        (_diagnosed(Cause.MEMORY, Conditions(memory=Memory.POISON)), " --memory poison"),
        (
            # without it, what fresh memory holds may be the same in every process of a replay
            replace(_diagnosed(Cause.MEMORY, Conditions(memory=Memory.ZEROS)), is_held=True),
            " --memory poison",
        ),
        (
            replace(_diagnosed(Cause.CLOCK, Conditions(clock=Clock.FAST, gpu="1")), is_held=True),
            " --gpu 1",
        ),
        (_diagnosed(Cause.NEIGHBOUR, Conditions(neighbours=3)), " --neighbours 3"),
        (
            _diagnosed(Cause.ORDER, PLAIN, "a#0 (bits)", "b#2 (bits)"),
            " --after 'a#0' --after 'b#2'",
        ),
        (
            _diagnosed(Cause.COMBINATION, Conditions(clock=Clock.FAST, neighbours=1), "a#0 (bits)"),
            " --clock fast --neighbours 1 --after 'a#0'",
        ),
    ],
)
def test_the_command_has_the_conditions_under_which_the_result_changes(
    diagnosis: Diagnosis, options: str, trial: NewTrial
) -> None:
    seen = trial(replay=_SEEN, conditions={"neighbours": "1", "memory": "zeros"})
    command = f"{_SEEN} --measure bits --times 7{options}"
    assert replay_of_diagnosis(diagnosis, seen) == command
    assert record_of(diagnosis, seen, 7, 2000.0).replay == command


def test_a_result_that_a_factor_holds_still_is_replayed_without_it(trial: NewTrial) -> None:
    turns = iter("ab" * 40)

    def shows(cell: Cell, count: int) -> list[str]:
        return ["a" if cell.conditions.clock is Clock.SLOW else next(turns) for _ in range(count)]

    found = diagnose(Suspect(sightings=(Sighting(signature="a"), Sighting(signature="b"))), shows)
    assert found.cause is Cause.CLOCK
    assert replay_of_diagnosis(found, trial(replay=_SEEN)) == f"{_SEEN} --measure bits --times 7"


def test_what_every_judged_trial_shows_is_replayed_with_the_evidence_of_its_oracles(
    trial: NewTrial,
) -> None:
    seen = trial(replay=_SEEN, measure="judged", outcome=Outcome.WRONG)
    assert replay_of_diagnosis(_diagnosed(Cause.ALWAYS, PLAIN), seen) == _SEEN
    assert replay_of_trial(seen) == _SEEN
    # of bits there is no evidence
    assert "--measure bits" in replay_of_diagnosis(_diagnosed(Cause.ALWAYS, PLAIN), trial())


def test_a_cause_that_nobody_knows_is_looked_for_where_it_was_seen(trial: NewTrial) -> None:
    seen = trial(replay=_SEEN, conditions={"neighbours": "1", "clock": "fast"})
    unknown = Diagnosis(cause=Cause.UNKNOWN, explanation="no time")
    command = f"{_SEEN} --measure bits --times 40 --neighbours 1 --clock fast"
    assert replay_of_diagnosis(unknown, seen) == command


def test_a_finding_without_diagnosis_is_replayed_under_the_conditions_of_its_trial(
    trial: NewTrial, scan_run: Callable[..., ScanRun]
) -> None:
    # of a version that knew another value
    odd = trial(1, outcome=Outcome.DIFFERENT, replay=_SEEN, conditions={"clock": "backwards"})
    page = morning([scan_run()], [trial(0), odd], today=date(2026, 1, 31))
    (finding,) = page.findings
    assert finding.replay == f"{_SEEN} --measure bits --times 40 --clock backwards"


def test_a_long_command_is_whole_on_every_page(
    trial: NewTrial, scan_run: Callable[..., ScanRun]
) -> None:
    odd = trial(1, outcome=Outcome.DIFFERENT, replay=_SEEN)
    before = tuple(f"{'case' * 40}#{number} (bits)" for number in range(20))
    record = record_of(_diagnosed(Cause.ORDER, PLAIN, *before), odd, 2, 2000.0)
    assert record.purpose is Purpose.DIAGNOSE
    page = morning([scan_run()], [trial(0), odd, record], today=date(2026, 1, 31))
    assert f"` {record.replay} `" in render_markdown(page)
    assert record.replay.count("--after") == 20
