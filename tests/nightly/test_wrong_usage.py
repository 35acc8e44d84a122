"""What the commands of the night say to somebody who made a mistake: what was given, where, what is
allowed and what was probably meant; exit code 4, no traceback, and nothing is lost or made."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from loragate.cli import main
from loragate.core.verdict import ExitCode
from loragate.history import ScanRun, TrialRecord, open_history
from loragate.history.lines import export_lines
from loragate.records.recorder import Recorder

NewRun = Callable[..., ScanRun]
NewTrial = Callable[..., TrialRecord]

_ENTRY = "- {case: some.dense_delta.dtype-bf16, reason: atomics, owner: ada, since: 2026-01-31"


@pytest.fixture
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scan_run: NewRun, trial: NewTrial
) -> Path:
    """A folder with a history, and files that are none."""
    monkeypatch.chdir(tmp_path)
    with open_history("good.db") as history:
        history.take([scan_run()], (), (trial(k) for k in range(3)))
        lines = "".join(f"{line}\n" for line in export_lines(history))
    Path("good.jsonl").write_text(lines, encoding="utf-8")
    Path("text.db").write_text("this is no database" * 100, encoding="utf-8")
    Path("short.db").write_bytes(Path("good.db").read_bytes()[:5000])
    Path("report").mkdir()
    for name, statement in {
        "newer": "UPDATE history_schema SET version = 99",
        "zeroth": "UPDATE history_schema SET version = 0",
        "empty": "DELETE FROM history_schema",
        "lost": "DROP TABLE trials",
        "env": "UPDATE scan_runs SET environment = '{torch'",
        "outcome": "UPDATE trials SET outcome = 'eaten'",
        "health": "UPDATE trials SET health = '[1]'",
        "orphan": "UPDATE trials SET run = 'lost'",
        "noon": "UPDATE trials SET at = 'noon' WHERE number = 2",
    }.items():
        shutil.copy("good.db", f"{name}.db")
        with sqlite3.connect(f"{name}.db") as connection:
            connection.execute(statement)
    return tmp_path


def _said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = int(str(ended.code))
    said = capsys.readouterr().err
    assert "Traceback" not in said, said
    return code, said


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("scan", "required: --budget"),
        ("scan --budget 0s", "--budget: must be a time as 90s, 20m or 2h (got '0s')"),
        ("scan --budget 20", "(got '20')"),
        ("scan --budget=-5m", "(got '-5m')"),
        ("scan --budget 1.5h", "(got '1.5h')"),
        (f"scan --budget {'9' * 400}h", "must be a time as"),
        ("scan --budget 5s --workers 0", "must be a number from 1 to 256 (got '0')"),
        ("scan --budget 5s --workers 100000", "must be a number from 1 to 256"),
        ("scan --budget 5s --since no-such-rev", "--since 'no-such-rev': git does not know"),
        ("scan --budget 5s --since=", "--since '': git does not know this revision"),
        ("scan --budget 5s --since=HEAD:README.md", "git does not know this revision"),
        ("scan --budget 5s --shard 1/2", "unknown arguments: --shard"),
        (
            "replay x --memory poisn",
            "there is no 'poisn'; known are plain, zeros, poison; did you me",
        ),
        ("replay x --clock fats", "did you mean fast?"),
        ("replay x --schedule late", "there is no 'late'; known are plain, blocking, delayed"),
        ("replay x --cache hot", "there is no 'hot'; known are warm, cold"),
        ("replay x --measure bit", "there is no 'bit'; known are bits, judged; did you mean bits?"),
        ("replay x --neighbours=-1", "must be a number from 0 to 255 (got '-1')"),
        ("replay x --times 0", "must be a number from 1 up (got '0')"),
        ("replay x --afer y", "unknown arguments: --afer y; did you mean --after?"),
        ("plan --shard 0/3", "must be I/N with 1 <= I <= N, as in 2/4 (got '0/3')"),
        ("plan --shard 4/3", "(got '4/3')"),
        ("plan --shard 3", "(got '3')"),
        ("plan --shard 1/2 --durations none", "none: cannot read events: No such file"),
        ("plan --durations text.db", "text.db: holds no run"),
        ("merge none", "none/events.jsonl: cannot read events: No such file"),
        ("merge report --report report", "is the report of a shard; name another folder"),
        ("history mrege x", "known are merge, import, export, prune; did you mean merge?"),
        ("history prune --history good.db --days 1", "--history must come before the action"),
        ("history --history good.db prune --days 0", "a number from 1 to 36500 (got '0')"),
        (f"history --history good.db prune --days {'9' * 5000}", "a number from 1 to 36500"),
        ("history --history good.db merge none.db", "there is no history 'none.db'"),
        ("history --history made.db merge none.db", "there is no history 'none.db'"),
        ("history --history made.db merge sqlite:///none.db", "'sqlite:///none.db'"),
        ("history --history good.db merge newer.db", "newer.db has schema 99; this version"),
        ("history --history good.db merge outcome.db", "outcome.db: trials with run night-1, num"),
        ("history --history good.db merge health.db", "health.db: trials with run night-1, numb"),
        ("history --history good.db merge noon.db", "noon.db: trials with run night-1, number 2"),
        (
            "history --history good.db merge orphan.db",
            "orphan.db: a trial belongs to a run that is",
        ),
        ("history --history good.db merge env.db", "env.db: scan_runs with uid night-1"),
        ("history --history good.db import none", "none: No such file or directory"),
        ("history --history good.db import report", "report: must be a regular file"),
        ("history --history good.db import /dev/zero", "/dev/zero: must be a regular file"),
        ("history --history good.db import good.db", "good.db:1: no record of a history"),
        # it would take the place of the history that it is an export of
        ("history --history good.db export good.db", "good.db: is a database; name another file"),
        ("history --history good.db export report", "report: Is a directory"),
        ("history --history good.db export /proc/x/y", "/proc/x/y: No such file or directory"),
        ("morning --history none.db", "there is no history 'none.db'"),
        ("morning --history=", "there is no history ''"),
        ("morning --history text.db", "history text.db: (sqlite3.DatabaseError) file is not a"),
        ("morning --history short.db", "history short.db: (sqlite3.DatabaseError) database disk"),
        ("morning --history newer.db", "update loragate, or name another history"),
        ("morning --history zeroth.db", "zeroth.db has schema 0, and must have one from 1 up"),
        ("morning --history empty.db", "has a table of its schema, and no schema in it"),
        ("morning --history lost.db", "lost.db lacks the table trials"),
        ("morning --history env.db", "env.db: scan_runs with uid night-1: "),
        ("morning --history outcome.db", "number 0: 'eaten' is not a valid Outcome"),
        ("morning --history health.db", "number 0: health must be an object"),
        ("morning --history noon.db", "number 2: could not convert string to float: 'noon'"),
        ("morning --history sqlite://", "names no file, as sqlite:///history.db does"),
        ("morning --history nosuch://h/x", "'nosuch' is not one of postgresql, sqlite"),
        ("morning --history mysql://h/x", "'mysql' is not one of postgresql, sqlite"),
        ("morning --history postgresql+none://h/x", "there is no driver 'postgresql+none'; use"),
        ("morning --history sqlite+aiosqlite:///good.db", "needs the package aiosqlite"),
        ("morning --history postgresql+psycopg://h:port/x", "a number as its port"),
        ("morning --history good.db --quarantine q.yml", "--quarantine q.yml: there is no such"),
        ("bench dense --against=", "--against must be a folder or a revision (got '')"),
        ("bench dense --against no-such-rev", "--against no-such-rev: neither a folder nor a rev"),
        ("bench dense --against report", "--against report: the folder holds no lorakernels"),
        ("bench moe --against HEAD~999999", "--against HEAD~999999: neither a folder nor a rev"),
        ("bench dense --against HEAD --subject torch", "leave out other subjects"),
        ("bench dense --against HEAD --rows nothing", "matches none of the 30 rows; they are nam"),
        ("gate --speed no-such-rev", "--speed no-such-rev: neither a folder nor a revision"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(
    command: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name for path in folder.iterdir()}
    code, said = _said(capsys, *command.split())
    assert message in said
    assert code == ExitCode.USAGE
    with open_history("good.db") as history:
        assert history.count() == 3
    made = {path.name for path in folder.iterdir()} - before
    # what was to be made holds nothing, and is not made
    assert not {name for name in made if not name.startswith("good.db-")} - {".loragate"}


_LINES: list[tuple[dict[str, object], str]] = [
    ({"outcome": "rihgt"}, "outcome must be one of right, different, wrong, infra, unknown (got"),
    ({"outcome": "rihgt"}, "did you mean right?"),
    ({"at": "noon"}, "at must be seconds since 1970, up to the year 9999 (got 'noon')"),
    ({"at": float("nan")}, "at must be seconds since 1970"),
    ({"at": 1e30}, "at must be seconds since 1970"),
    ({"at": -1}, "at must be seconds since 1970"),
    ({"at": True}, "at must be seconds since 1970"),
    ({"number": 1.5}, "number must be a whole number from 0 to 2147483647 (got 1.5)"),
    ({"number": -1}, "number must be a whole number"),
    ({"draw": 10**30}, "draw must be a whole number"),
    ({"promised": "yes"}, "promised must be true or false (got 'yes')"),
    ({"case": None}, "case must be a text (got None)"),
    ({"case": "a\0b"}, "case must be a text"),
    ({"case": "\ud800"}, "case must be a text"),
    ({"run": ""}, "run must be a text of 1 to 64 letters (got '')"),
    ({"run": "another"}, "there is no run 'another' above it, nor in the history"),
    ({"health": [1]}, "health must be an object with numbers (got [1])"),
    ({"conditions": {"memory": 1}}, "conditions must be an object with texts"),
    ({"outcom": "right"}, "there is no field 'outcom'; did you mean outcome?"),
    ({"duration_s": -1}, "duration_s must be a number of seconds (got -1)"),
]


@pytest.mark.parametrize(("changes", "message"), _LINES)
def test_a_field_of_a_line_that_no_trial_has_is_named(
    changes: dict[str, object],
    message: str,
    folder: Path,
    trial: NewTrial,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = Path("good.jsonl").read_text(encoding="utf-8").splitlines()
    lines.append(json.dumps({"kind": "trial", "of": asdict(trial(9)) | changes}))
    Path("bad.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    code, said = _said(capsys, "history", "--history", "other.db", "import", "bad.jsonl")
    assert f"bad.jsonl:{len(lines)}: no record of a history: " in said
    assert message in said
    assert code == ExitCode.USAGE
    with open_history("other.db") as history:
        assert history.count() == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"schema": "one"}', 'must be as {"schema": 1}'),
        ('{"schema": 0}', 'must be as {"schema": 1}'),
        ('{"schema": 99}', "has schema 99; this version of loragate reads up to 1"),
        ("[1]", 'must be as {"schema": 1}'),
        ("[" * 100_000, "is nested too deeply"),
        ("{", "is not JSON: Expecting property name enclosed in double quotes in column"),
    ],
)
def test_a_first_line_that_names_no_schema_is_refused(
    line: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.jsonl").write_text(f"{line}\n", encoding="utf-8")
    code, said = _said(capsys, "history", "--history", "other.db", "import", "bad.jsonl")
    assert "bad.jsonl:1: no record of a history: " in said
    assert message in said
    assert code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (_ENTRY.replace("2026-01-31", "2062-01-31") + "}", "since must not be a day to come"),
        (_ENTRY.replace("2026-01-31", "2026-02-30") + "}", "q.yaml:1: there is no date"),
        (_ENTRY.replace("2026-01-31", "'2026-01-31'") + "}", "since must be a date as 2026-01-31"),
        (_ENTRY.replace("bf16", "bf17") + "}", "did you mean some.dense_delta.dtype-bf16?"),
        (_ENTRY + f", clean_runs: {'9' * 5000}}}", "q.yaml: Exceeds the limit (4300 digits)"),
        (_ENTRY + ", clean_runs: !!float ten}", "q.yaml: could not convert string to float: 'ten'"),
        (_ENTRY + ", clean_runs: yes}", "clean_runs must be a number from 1 up (got True)"),
    ],
)
def test_a_mistake_in_the_quarantine_is_named_by_the_command(
    entry: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("q.yaml").write_text(f"{entry}\n", encoding="utf-8")
    code, said = _said(capsys, "morning", "--history", "good.db", "--quarantine", "q.yaml")
    assert (code, "q.yaml" in said, message in said) == (ExitCode.USAGE, True, True), said


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_tried(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("scan", "--budget=2h", "--subject=torch", "--history=new.db")
    code, said = _said(capsys, *command, "--report=good.jsonl")
    assert code == ExitCode.INFRASTRUCTURE
    assert "report folder good.jsonl: cannot be written: File exists" in said
    assert not Path("new.db").exists()


def test_what_was_found_is_shown_although_its_report_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["morning", "--history=good.db", "--report=good.jsonl"]) == ExitCode.INFRASTRUCTURE
    shown = capsys.readouterr()
    assert "Undecided, and what it takes" in shown.out
    assert "page:" not in shown.out
    assert "report folder good.jsonl: cannot be written" in shown.err


@pytest.mark.parametrize("record", ["/proc/x.json", "/proc/x/y.json", "good.jsonl/x.json"])
def test_a_record_that_cannot_be_written_is_refused_before_anything_is_tried(
    record: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("scan", "--budget=2h", "--subject=torch", "--history=new.db")
    code, said = _said(capsys, *command, f"--record={record}")
    assert code == ExitCode.INFRASTRUCTURE
    assert f"{record}: cannot be written: " in said
    assert not Path("new.db").exists()


def test_a_record_in_a_new_folder_is_made_at_the_end_and_not_before(folder: Path) -> None:
    Recorder.open(Path("a/b/record.json"), "scan")
    assert not Path("a").exists()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("postgresql+psycopg://ada@/name?host=/no/such/folder", "psycopg.OperationalError"),
        ("/proc/h.db", "history /proc/h.db: (sqlite3.OperationalError) unable to open"),
    ],
)
def test_a_database_that_does_not_answer_is_worth_another_try(
    where: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "psycopg" in where:
        pytest.importorskip("psycopg")
    code, said = _said(capsys, "history", "--history", where, "merge", "good.db")
    assert (code, message in said) == (ExitCode.INFRASTRUCTURE, True), said


@pytest.mark.parametrize(
    "files", [["cut.jsonl"], ["good.jsonl", "cut.jsonl"], ["missing.jsonl"], ["report"]]
)
def test_an_import_that_fails_makes_no_history(
    files: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("good.jsonl").read_text(encoding="utf-8")
    Path("cut.jsonl").write_text(text[:-9], encoding="utf-8")
    code, said = _said(capsys, "history", "--history", "new.db", "import", *files)
    assert code == ExitCode.USAGE
    assert said.startswith(f"loragate history: {files[-1]}:")
    assert said.count("\n") == 1
    assert not list(folder.glob("new.db*"))


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["text.db"], "history text.db: (sqlite3.DatabaseError) file is not a database"),
        (["zero.db"], "history 'zero.db': the file is empty"),
        (["good.db", "outcome.db"], "outcome.db: trials with run night-1, number 0: is no record"),
        (["env.db"], "env.db: scan_runs with uid night-1: "),
    ],
)
def test_a_merge_that_fails_makes_no_history(
    others: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("zero.db").touch()
    code, said = _said(capsys, "history", "--history", "new.db", "merge", *others)
    assert (code, message in said) == (ExitCode.USAGE, True), said
    assert not list(folder.glob("new.db*"))
    # a copy that was cut does not become a history by that
    assert not Path("zero.db").read_bytes()
