"""Sessions without workers, with workers that cannot start, and without any case."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from loragate.core.verdict import ExitCode, Failure, Verdict
from loragate.events.log import read_events
from loragate.events.model import CaseStarted, RunFinished
from loragate.matrix.ids import run_id
from loragate.matrix.load import load_cases
from loragate.report.summary import summarize

ROOT = Path(__file__).parents[2]
SUBJECT = "misbehaving_subject:Misbehaving"
MATRICES = Path(__file__).parent / "misbehaving"
NIGHTLY = (MATRICES / "four_good.yaml").read_text().replace("smoke", "nightly")


@pytest.fixture(scope="module")
def alone(run_once, run_session):
    return run_once("alone", lambda report: run_session(report, "-n", "0", matrix="one_hang.yaml"))


def test_a_hang_without_workers_ends_the_session_with_its_stack_on_the_terminal(alone):
    assert alone.exit_code != 0
    assert "Timeout (0:00:02)!" in alone.output
    assert "in sleep" in alone.output


def test_what_ran_before_a_hang_without_workers_stays_in_the_record(alone):
    assert alone.of_tokens(21).verdict is Verdict.PASS
    assert alone.of_tokens(17).judgements[0].failure is Failure.OUT_OF_MEMORY
    assert not any(isinstance(event, RunFinished) for event in alone.log.events)


def test_the_record_of_a_killed_session_names_the_case_and_does_not_pass(alone):
    summary = summarize(alone.log)
    assert summary.exit_code is not ExitCode.OK
    (lost,) = [case for case in summary.cases if case.shown is None]
    (last,) = [e for e in alone.log.events[-1:] if isinstance(e, CaseStarted)]
    assert lost.run_id == last.run_id


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_subject_that_ends_the_process_as_if_all_was_done_fails_the_session(
    tmp_path, run_session, workers
):
    matrix = _leaving(tmp_path)
    session = run_session(tmp_path / "report", "-n", workers, matrix=matrix)
    assert session.exit_code == ExitCode.WRONG, session.output
    assert session.of_tokens(21).verdict is Verdict.PASS
    if workers == "0":
        assert "os._exit(0) before the work was done" in session.output
        assert "in leave_as_if_done" in session.output


def test_a_subject_that_ends_the_process_when_it_is_imported_fails_the_session(
    tmp_path, run_session
):
    arguments = {"matrix": "one_good.yaml", "subject": "leaves_at_import:Subject"}
    session = run_session(tmp_path / "report", "-n", "0", **arguments, LEAVES_WITH="0")
    assert session.exit_code == ExitCode.WRONG, session.output
    assert "os._exit(0) before the work was done" in session.output


def _leaving(folder):
    """A matrix of a good case, and one whose subject ends its process with 0."""
    matrix = folder / "leaving.yaml"
    good = (MATRICES / "four_good.yaml").read_text()
    matrix.write_text(good.replace("[21, 22, 23, 24]", "[19, 21]"))
    return matrix


def test_workers_that_die_before_they_collect_end_the_session(tmp_path, run_session):
    session = run_session(
        tmp_path / "report", "-n", "2", "-p", "exits_before_collecting", matrix="one_hang.yaml"
    )
    assert session.exit_code == ExitCode.INFRASTRUCTURE
    assert "3 workers died before they could run anything" in session.output


def test_a_subject_whose_name_is_not_ascii_is_accounted_for_with_workers(
    tmp_path, subject_environment, run_session
):
    (tmp_path / "maß.py").write_text(
        "from loragate.subjects.torch.subject import TorchSubject as Größe\n"
    )
    path = f"{subject_environment['PYTHONPATH']}:{tmp_path}"
    arguments = (tmp_path / "report", "-n", "1", "--loragate-cases=*tokens-21")
    session = run_session(*arguments, matrix="four_good.yaml", subject="maß:Größe", PYTHONPATH=path)
    assert session.exit_code == ExitCode.OK, session.output
    total = summarize(session.log).total
    assert (total.subject, total.expected, total.passed) == ("total", 1, 1)


def test_a_distribution_that_hangs_when_a_worker_dies_is_refused(tmp_path, run_session):
    session = run_session(
        tmp_path / "report", "-n", "2", "--dist", "loadfile", matrix="one_hang.yaml"
    )
    assert session.exit_code == ExitCode.USAGE
    assert "--dist loadfile does not survive a worker that dies" in session.output


BROKEN_PLACES = {
    "a fixture of a case at its end": (
        "conftest.py",
        "import pytest\n@pytest.fixture(autouse=True)\ndef broken():\n"
        "    yield\n    raise OSError('disk full')\n",
    ),
    "a module that cannot be imported": ("test_other.py", "raise OSError('disk full')\n"),
}


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("place", BROKEN_PLACES)
def test_a_failure_outside_of_the_cases_fails_the_session_and_its_report(
    tmp_path, subject_environment, run_python, place, workers
):
    name, text = BROKEN_PLACES[place]
    _project(tmp_path, name, text)
    command = [
        *("-m", "pytest", "cases", "-p", "no:cacheprovider", "-n", workers),
        *("--import-mode=importlib", "--continue-on-collection-errors", "--rootdir=."),
        *(f"--loragate-matrix={MATRICES / 'four_good.yaml'}", "--loragate-subject=torch"),
        "--loragate-cases=*tokens-21",
    ]
    done = run_python(*command, cwd=tmp_path, env=subject_environment)
    assert "1 passed" in done.stdout, done.stdout
    assert "disk full" in done.stdout
    assert done.returncode == ExitCode.WRONG, done.stdout
    summary = summarize(read_events(tmp_path / "report" / "events.jsonl"))
    assert summary.exit_code is ExitCode.WRONG
    assert summary.reasons == (
        "1 host test failed",
        "leg pytest: fail: 1 failure outside of the cases, reported by pytest",
    )
    (failed,) = summary.bad_host_tests
    assert failed.test.startswith("cases/")
    assert failed.message.endswith("OSError: disk full")
    assert failed.place.startswith(f"cases/{name}:")
    # the test is named, so the leg needs no entry of its own
    junit = ElementTree.parse(tmp_path / "report" / "junit.xml").getroot()
    assert [
        case.get("name") for case in junit.iter("testcase") if len(case.findall("failure"))
    ] == [failed.test]


BESIDE_CASES = {
    "a test that goes on after its case": (
        "def test_more(case_run, judge):\n    judge(case_run)\n    assert False, 'wrong beside'\n"
    ),
    "a test with the name of a case": (
        "import pytest\n"
        "NAME = 'torch.dense_delta.dtype-fp32.exec-eager.in-32.layout-contiguous.mix-ragged.'\\\n"
        "    'rank-8.ranks-mixed.slices-16.slots-4.tokens-21'\n"
        "@pytest.mark.parametrize('name', [NAME], ids=[NAME])\n"
        "def test_name(name): assert False, 'wrong beside'\n"
    ),
}


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("text", BESIDE_CASES.values(), ids=BESIDE_CASES)
def test_a_failure_that_no_oracle_reports_fails_the_report_as_well(
    tmp_path, session_beside, text, workers
):
    session = session_beside(text, workers, MATRICES / "four_good.yaml")
    assert session.exit_code == ExitCode.WRONG, session.output
    summary = summarize(session.log)
    assert summary.total.passed == summary.total.expected == 1
    (failed,) = summary.bad_host_tests
    assert "wrong beside" in failed.message


OTHER_PARAMETERS = {
    "of a mark": "@pytest.mark.parametrize('times', [1, 2])\n",
    "of a fixture": "@pytest.fixture(params=[1, 2])\ndef times(request): return request.param\n",
}


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("parameters", OTHER_PARAMETERS.values(), ids=OTHER_PARAMETERS)
def test_a_test_of_cases_with_other_parameters_is_refused_as_nothing_would_account_for_it(
    session_beside, parameters, workers
):
    text = f"import pytest\n{parameters}def test_own(case_run, judge, times): judge(case_run)\n"
    session = session_beside(text, workers, MATRICES / "four_good.yaml")
    assert session.exit_code != ExitCode.OK, session.output
    assert "test_own: has parameters besides case_run" in session.output


@pytest.mark.parametrize("workers", ["0", "1"])
def test_ordinary_tests_that_pass_do_not_stand_for_cases_that_the_tier_does_not_have(
    tmp_path, session_beside, workers
):
    matrix = tmp_path / "nightly.yaml"
    matrix.write_text(NIGHTLY)
    session = session_beside("def test_other(): pass\n", workers, matrix)
    assert "1 passed" in session.output
    assert session.exit_code == ExitCode.INCOMPLETE, session.output
    assert "no case of tier smoke was selected" in session.output


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_module_that_is_named_and_has_no_case_of_the_tier_has_shown_nothing(
    tmp_path, run_python, subject_environment, workers
):
    _project(tmp_path, "nightly.yaml", NIGHTLY)
    (tmp_path / "cases" / "test_cases.py").rename(tmp_path / "test_own.py")
    done = run_python(*_own_tests("test_own.py", workers), cwd=tmp_path, env=subject_environment)
    assert "1 skipped" in done.stdout
    assert done.returncode == ExitCode.INCOMPLETE, done.stdout
    assert "no case of tier smoke was selected" in done.stdout


@pytest.mark.parametrize("workers", ["0", "1"])
def test_paths_are_relative_to_the_folder_that_pytest_was_called_in(
    tmp_path, run_python, subject_environment, workers
):
    _project(tmp_path, "good.yaml", (MATRICES / "four_good.yaml").read_text())
    folder = tmp_path / "sub"
    folder.mkdir()
    first = [*_own_tests("../cases", workers), "--rootdir=..", "--loragate-cases=tokens-21"]
    # the first one leaves what the second one reads
    for options in ([], ["--loragate-report=other", "--loragate-durations=report"]):
        done = run_python(*first, *options, cwd=folder, env=subject_environment)
        assert done.returncode == ExitCode.OK, done.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["other", "report"]
    assert not (tmp_path / "report").exists()


def test_a_case_whose_draws_are_left_out_in_part_is_inconclusive(tmp_path, run_session):
    (case,) = (c for c in load_cases([MATRICES / "four_good.yaml"]) if c.tokens == 21)
    left_out = f"--deselect=cases/test_cases.py::test_case[{run_id('torch', case)}#1]"
    options = ["-n", "0", "--loragate-draw=0", "--loragate-draw=1", left_out]
    session = run_session(tmp_path / "report", *options, matrix="four_good.yaml", subject="torch")
    assert session.exit_code == ExitCode.INCOMPLETE, session.output
    assert session.output.count("passed, but never started: draw 1") == 1


def _own_tests(path, workers):
    options = ["-p", "no:cacheprovider", "--import-mode=importlib", "--loragate-subject=torch"]
    return ["-m", "pytest", path, "-n", workers, "--rootdir=.", *options]


@pytest.fixture
def session_beside(tmp_path, run_python, subject_environment, session_of):
    """A session of one case, if there is one, and of a module with this text, in a project of its
    own."""

    def run(text, workers, matrix):
        _project(tmp_path, "test_beside.py", text)
        command = [
            *("-m", "pytest", ".", "-p", "no:cacheprovider", "-n", workers, "--rootdir=."),
            *("--import-mode=importlib", f"--loragate-matrix={matrix}", "--loragate-subject=torch"),
            *(["--loragate-cases=*tokens-21"] if matrix.parent == MATRICES else []),
        ]
        done = run_python(*command, cwd=tmp_path, env=subject_environment)
        return session_of(done, tmp_path / "report")

    return run


def _project(folder, name, text):
    (folder / "cases").mkdir()
    shutil.copy(ROOT / "cases" / "test_cases.py", folder / "cases")
    (folder / "conftest.py").write_text('pytest_plugins = ["loragate.plugin"]\n')
    (folder / "cases" / name).write_text(text)


@pytest.mark.usefixtures("heeded_signals")
@pytest.mark.parametrize("workers", ["0", "1"])
def test_ctrl_c_leaves_the_case_that_runs_inconclusive_and_the_terminal_names_it(
    tmp_path, subject_environment, wait_until_it_sleeps, workers
):
    report = tmp_path / "report"
    command = [
        *(sys.executable, "-m", "pytest", "cases", "-p", "no:cacheprovider", "-n", workers),
        *(f"--loragate-report={report}", f"--loragate-subject={SUBJECT}"),
        f"--loragate-matrix={MATRICES / 'long_sleep.yaml'}",
    ]
    with subprocess.Popen(
        command, cwd=ROOT, env=subject_environment, stdout=subprocess.PIPE, text=True
    ) as session:
        try:
            wait_until_it_sleeps(report / "events.jsonl")
            session.send_signal(signal.SIGINT)
            output, _ = session.communicate(timeout=120)
        finally:
            session.kill()
    assert session.returncode == ExitCode.INCOMPLETE, output
    assert "tokens-13\n  interrupted" in output
    summary = summarize(read_events(report / "events.jsonl"))
    assert [(case.verdict, case.failure) for case in summary.troubles] == [
        (Verdict.INCONCLUSIVE, None)
    ]
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert "leg pytest: inconclusive: interrupted" in summary.reasons


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("option", ["-k", "-m"])
def test_a_wrong_expression_is_a_usage_error_and_touches_no_report(
    tmp_path, run_session, workers, option
):
    arguments = (tmp_path / "report", "-n", workers, option, "a b")
    session = run_session(*arguments, matrix="one_good.yaml", subject="torch")
    assert session.exit_code == ExitCode.USAGE, session.output
    assert f"Wrong expression passed to '{option}': a b" in session.output
    assert not (tmp_path / "report").exists()


BROKEN_HOOK = "def pytest_collection_modifyitems(): raise OSError('disk full')\n"


def test_a_collection_that_fails_touches_no_report(tmp_path, subject_environment, run_python):
    _project(tmp_path, "conftest.py", BROKEN_HOOK)
    command = [
        *("-m", "pytest", "cases", "-p", "no:cacheprovider", "--rootdir=."),
        *(f"--loragate-matrix={MATRICES / 'one_good.yaml'}", "--loragate-subject=torch"),
    ]
    done = run_python(*command, cwd=tmp_path, env=subject_environment)
    assert done.returncode == ExitCode.INFRASTRUCTURE
    assert "disk full" in done.stdout
    assert not (tmp_path / "report").exists()


def test_a_session_that_stops_after_failures_says_so_instead_of_that_it_was_interrupted(
    tmp_path, run_session
):
    cases = ("--loragate-cases=*tokens-18", "--loragate-cases=*tokens-16")
    session = run_session(
        tmp_path / "report", "-n", "1", "--maxfail=1", *cases, matrix="misbehaving.yaml"
    )
    assert session.exit_code == ExitCode.WRONG, session.output
    summary = summarize(session.log)
    assert summary.reasons == (
        "1 case wrong",
        "leg pytest: fail: stopping after 1 failures",
        "1 planned case was never started",
        "misbehaving_subject:Misbehaving/dense_delta: 1 of 2 expected executed",
    )


def test_listing_the_cases_leaves_no_report(tmp_path, run_session):
    session = run_session(
        tmp_path / "report", "-n", "1", "--collect-only", "-q", matrix="one_hang.yaml"
    )
    assert "tokens-21]" in session.output
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_session_of_cases_of_which_the_tier_has_none_has_judged_nothing(
    tmp_path, run_session, workers
):
    matrix = tmp_path / "nightly.yaml"
    matrix.write_text(NIGHTLY)
    session = run_session(tmp_path / "report", "-n", workers, matrix=str(matrix), subject="torch")
    assert session.exit_code == ExitCode.INCOMPLETE, session.output
    assert "no case of tier smoke was selected" in session.output
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("option", ["report", "matrix", "durations"])
def test_a_path_of_a_variable_that_is_not_set_is_a_usage_error(tmp_path, run_session, option):
    session = run_session(tmp_path / "report", f"--loragate-{option}=", matrix="one_good.yaml")
    assert session.exit_code == ExitCode.USAGE
    assert f"argument --loragate-{option}: must be a path (got '')" in session.output


def test_an_unknown_subject_is_a_usage_error_that_names_the_nearest(tmp_path, run_session):
    session = run_session(
        tmp_path / "report", "-n", "1", "--loragate-subject=torhc", matrix="one_hang.yaml"
    )
    assert session.exit_code == ExitCode.USAGE
    assert "there is no subject 'torhc'" in session.output
    assert "did you mean 'torch'?" in session.output
    assert not (tmp_path / "report").exists()


@pytest.mark.usefixtures("started_anew")
def test_a_session_without_cases_leaves_no_report_and_its_controller_imports_no_torch(tmp_path):
    (tmp_path / "conftest.py").write_text(
        'import sys\npytest_plugins = ["loragate.plugin"]\n'
        "def pytest_unconfigure(config):\n"
        "    if not hasattr(config, 'workerinput'):\n"
        "        open('controller.txt', 'w').write(' '.join(sys.modules))\n"
    )
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", "."]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert not (tmp_path / "report").exists()
    loaded = (tmp_path / "controller.txt").read_text().split()
    assert "loragate.plugin.accounting" in loaded
    assert "torch" not in loaded
