"""A gate that is killed, and a disk that is full: nothing runs on, and nothing is lost."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from loragate.cli import main
from loragate.core.verdict import ExitCode, Verdict
from loragate.events.log import read_events
from loragate.events.model import CaseFinished, RunFinished
from loragate.report.summary import summarize

ROOT = Path(__file__).parents[2]
MATRICES = Path(__file__).parent / "misbehaving"


def wait_until_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still live after 30 s."""
    deadline = time.monotonic() + 30
    alive = processes
    while alive and time.monotonic() < deadline:
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.05)
    return alive


@pytest.mark.drill(
    tried="SIGKILL of the gate while a case runs, then `loragate report`",
    exit_code=ExitCode.INFRASTRUCTURE,
    kept="all finished cases; no process is left; the pages are written again from the events",
)
def test_sigkill_of_the_gate_leaves_no_process_and_a_record_that_can_be_reported(
    tmp_path, sleeping_gate, wait_until_it_sleeps, capsys, drill
):
    gate = sleeping_gate()
    report = tmp_path / "report"
    wait_until_it_sleeps(report / "events.jsonl")
    started = psutil.Process(gate.pid).children(recursive=True)
    # the leg, its workers, and the process that ends them
    assert len(started) >= 3
    gate.kill()
    gate.wait()
    assert wait_until_gone(started) == []
    assert not (report / "index.html").exists()
    drill(main(["report", str(report)]), capsys.readouterr().err)
    ends = [e for e in read_events(report / "events.jsonl").events if isinstance(e, CaseFinished)]
    assert [end.verdict for end in ends] == [Verdict.PASS]
    assert "the run did not come to its end" in (report / "index.html").read_text()
    assert "tokens-13" in (report / "junit.xml").read_text()


def test_pages_that_were_lost_are_written_again_as_they_were(tmp_path, run_session, capsys):
    done = run_session(tmp_path / "report", matrix="four_good.yaml")
    assert done.exit_code == ExitCode.OK, done.output
    pages = {name: (done.report / name).read_bytes() for name in ("index.html", "junit.xml")}
    for name in pages:
        (done.report / name).unlink()
    assert main(["report", str(done.report)]) == ExitCode.OK
    assert {name: (done.report / name).read_bytes() for name in pages} == pages
    assert "every expected case ran and passed" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["nowhere", "a_file"])
def test_a_folder_without_events_is_no_report(tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    Path("a_file").write_text("")
    assert main(["report", folder]) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"loragate report: {folder}/events.jsonl: cannot read events: ")


def can_mount() -> bool:
    """Whether this user may mount a small file system, in a name space of its own."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def on_small_disk(tmp_path, subject_environment):
    """Runs Python with a report on a file system of that size, and keeps what it left."""
    if not can_mount():
        pytest.skip("this user may not mount a file system")

    def run(size: str, arguments: str, report_option: str) -> tuple[int, str, Path]:
        disk, kept = tmp_path / "disk", tmp_path / "kept"
        disk.mkdir()
        tried = f"{sys.executable} {arguments} {report_option}={disk}/report"
        mounted = f"mount -t tmpfs -o size={size} tmpfs {disk}"
        script = f"{mounted} && {{ {tried}; code=$?; cp -r {disk}/report {kept}; exit $code; }}"
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", script],
            cwd=tmp_path,
            env=subject_environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout, kept

    return run


@pytest.fixture
def gate_on_small_disk(on_small_disk):
    gate = f"-m loragate gate --subject torch --matrix {MATRICES / 'four_good.yaml'}"
    return lambda size: on_small_disk(size, gate, "--report")


@pytest.mark.drill(
    tried="A disk that is full before the last case has been recorded",
    exit_code=ExitCode.INFRASTRUCTURE,
    kept="the cases that fitted on the disk; the terminal shows the summary and names the file",
)
def test_a_disk_that_is_full_is_no_failure_of_a_case_and_the_summary_is_printed(
    gate_on_small_disk, drill
):
    code, output, kept = gate_on_small_disk("8k")
    drill(code, output)
    assert "events.jsonl: cannot be written: No space left on device" in output
    assert "INFRA in" in output
    assert "torch/dense_delta" in output
    summary = summarize(read_events(kept / "events.jsonl"))
    # a case whose end was not recorded is not charged to the subject
    assert all(case.verdict is not Verdict.FAIL for case in summary.cases)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_session_whose_disk_is_full_in_the_middle_says_so_in_its_summary(on_small_disk, workers):
    session = (
        f"-m pytest {ROOT / 'cases'} --rootdir={ROOT} --config-file={ROOT / 'pyproject.toml'} "
        f"-p no:cacheprovider -n {workers} --loragate-repeats=8 --loragate-subject=torch "
        f"--loragate-matrix={MATRICES / 'four_good.yaml'}"
    )
    code, output, _ = on_small_disk("8k", session, "--loragate-report")
    assert code == ExitCode.INFRASTRUCTURE, output
    assert "INFRA in" in output
    assert "3 planned cases were never started" in output
    assert "leg pytest: infra: " in output


@pytest.mark.drill(
    tried="A disk with no room for the pages of a run that passed",
    exit_code=ExitCode.INFRASTRUCTURE,
    kept="every event, from which `loragate report` writes the pages elsewhere",
)
def test_a_run_whose_pages_do_not_fit_is_judged_from_its_events(gate_on_small_disk, drill, capsys):
    code, output, kept = gate_on_small_disk("20k")
    drill(code, output)
    assert "4            4            4" in output
    assert "cannot be written: No space left on device" in output
    events = read_events(kept / "events.jsonl").events
    assert isinstance(events[-1], RunFinished)
    assert main(["report", str(kept)]) == ExitCode.OK


@pytest.mark.drill(
    tried="A reader of the output that leaves early, as in `loragate gate | head -1`",
    exit_code=ExitCode.OK,
    kept="everything; the exit code is that of the run",
)
def test_a_gate_whose_reader_has_left_runs_to_its_end(tmp_path, start_gate, drill):
    gate = start_gate("--subject=torch", f"--matrix={MATRICES / 'four_good.yaml'}")
    assert gate.stdout is not None
    assert "4 cases of torch" in gate.stdout.readline()
    gate.stdout.close()
    drill(gate.wait(120))
    events = read_events(tmp_path / "report" / "events.jsonl").events
    assert isinstance(events[-1], RunFinished)
    assert (tmp_path / "report" / "index.html").exists()
