"""A history keeps what it was told: under several writers, killed ones, and in other databases."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest
from sqlalchemy import text

from loragate.cli import main
from loragate.core.verdict import ExitCode
from loragate.history import (
    History,
    HistoryError,
    Outcome,
    PathFiles,
    ScanRun,
    TrialRecord,
    open_history,
    store,
    tables,
)
from loragate.history.fields import checked
from loragate.history.lines import export_lines, import_lines
from loragate.history.model import glance_at

NewRun = Callable[..., ScanRun]
NewTrial = Callable[..., TrialRecord]
Records = tuple[NewRun, NewTrial]


def test_what_was_added_is_read_again_in_the_order_of_time(
    tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    first, second = trial(0, conditions={"memory": "zeros"}), trial(1, health={"clock": 1.5})
    with open_history(tmp_path / "h.db") as history:
        history.add_run(scan_run(environment={"torch": "2.13"}))
        history.add(second)
        history.add(first)
    with open_history(tmp_path / "h.db") as history:
        assert list(history.trials()) == [first, second]
        assert history.runs() == (scan_run(environment={"torch": "2.13"}),)
        assert list(history.trials(since=second.at)) == [second]


def test_a_run_that_ends_later_keeps_its_end(tmp_path: Path, scan_run: NewRun) -> None:
    with open_history(tmp_path / "h.db") as history:
        history.add_run(scan_run())
        history.add_run(scan_run(finished_at=2000.0))
        # a copy of the run from before its end changes nothing
        history.add_run(scan_run())
        # nor does another end
        history.add_run(scan_run(finished_at=3000.0))
        assert [run.finished_at for run in history.runs()] == [2000.0]


def test_a_trial_of_an_unknown_run_is_refused(tmp_path: Path, trial: NewTrial) -> None:
    with open_history(tmp_path / "h.db") as history, pytest.raises(HistoryError, match="no run x"):
        history.add(trial(run="x"))


def test_merging_counts_each_trial_once(tmp_path: Path, scan_run: NewRun, trial: NewTrial) -> None:
    here, there = open_history(tmp_path / "here.db"), open_history(tmp_path / "there.db")
    for history, uid in ((here, "a"), (there, "b")):
        history.add_run(scan_run(uid))
        history.add(trial(0, uid))
    there.add_run(scan_run("b", finished_at=9.0))
    there.add(trial(1, "b"))
    there.add_path(PathFiles(path_key="key1", files=("a.py",)))
    assert here.merge(there) == 2
    assert here.merge(there) == 0
    # and back again
    assert there.merge(here) == 1
    assert list(here.trials()) == list(there.trials())
    assert here.paths() == there.paths() != ()
    # a copy from before the end of the run changes nothing
    old = open_history(tmp_path / "old.db")
    old.add_run(scan_run("b"))
    assert here.merge(old) == 0
    assert [run.finished_at for run in here.runs()] == [None, 9.0]
    # and gets its end
    old.merge(here)
    assert [run.finished_at for run in old.runs()] == [None, 9.0]


@pytest.mark.parametrize("batch", [store._BATCH, 2])
def test_a_history_travels_as_lines(
    tmp_path: Path,
    scan_run: NewRun,
    trial: NewTrial,
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
) -> None:
    # records are added and read in batches
    monkeypatch.setattr(store, "_BATCH", batch)
    with open_history(tmp_path / "h.db") as history:
        history.add_run(scan_run())
        for number in range(3):
            history.add(trial(number, outcome=Outcome.WRONG, conditions={"order": "7"}))
        history.add_path(PathFiles(path_key="key1", files=("a.py", "b.py")))
        lines, expected = list(export_lines(history)), list(history.trials())
    path = tmp_path / "h.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with open_history(tmp_path / "other.db") as history:
        assert import_lines(history, path) == 3
        assert import_lines(history, path) == 0
        assert list(history.trials()) == expected
        assert history.paths() == (PathFiles(path_key="key1", files=("a.py", "b.py")),)


def test_runs_and_paths_travel_as_lines_without_a_trial(tmp_path: Path, scan_run: NewRun) -> None:
    path = tmp_path / "h.jsonl"
    with open_history(tmp_path / "h.db") as history:
        history.add_run(scan_run(finished_at=2000.0))
        history.add_path(PathFiles(path_key="key1", files=("a.py",)))
        path.write_text("".join(f"{line}\n" for line in export_lines(history)), encoding="utf-8")
        runs, paths = history.runs(), history.paths()
    with open_history(tmp_path / "other.db") as history:
        assert import_lines(history, path) == 0
        assert (history.runs(), history.paths()) == (runs, paths) != ((), ())


def test_nothing_is_taken_of_a_file_that_is_cut(
    tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    with open_history(tmp_path / "h.db") as history:
        history.add_run(scan_run())
        for number in range(3):
            history.add(trial(number))
        text = "".join(f"{line}\n" for line in export_lines(history))
    path = tmp_path / "h.jsonl"
    first = text.index("\n")
    with open_history(tmp_path / "other.db") as history:
        for size in (1, first, first + 9, len(text) // 2, len(text) - 5, len(text) - 1):
            path.write_text(text[:size], encoding="utf-8")
            with pytest.raises(HistoryError, match=r"h\.jsonl:[1-5]: .*the file is cut"):
                import_lines(history, path)
        for kept in (1, 2, 4):
            path.write_text("".join(text.splitlines(keepends=True)[:kept]), encoding="utf-8")
            with pytest.raises(
                HistoryError, match=rf"h\.jsonl: {kept - 1} records follow .* says 4"
            ):
                import_lines(history, path)
        path.write_text("", encoding="utf-8")
        with pytest.raises(HistoryError, match="the file is empty"):
            import_lines(history, path)
        assert history.count() == 0 == len(history.runs())


def test_an_export_that_does_not_say_how_many_records_it_has_is_taken(
    tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    with open_history(tmp_path / "h.db") as history:
        history.add_run(scan_run())
        history.add(trial(0))
        _, *records = export_lines(history)
    path = tmp_path / "h.jsonl"
    lines = [json.dumps({"schema": 1}), *records]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with open_history(tmp_path / "other.db") as history:
        assert import_lines(history, path) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "no record of a history: is not JSON"),
        ('{"kind": "night", "of": {}}', "kind must be run, path or trial"),
        ('{"kind": "run", "of": {"uid": "a", "weather": 1}}', "no field 'weather'"),
        ('{"kind": "run", "of": {"uid": "a"}}', "machine"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text(f'{{"schema": 1}}\n{line}\n', encoding="utf-8")
    with open_history(tmp_path / "h.db") as history:
        with pytest.raises(HistoryError, match=rf"h\.jsonl:2: .*{message}"):
            import_lines(history, path)
        assert history.count() == 0


def test_lines_and_databases_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text('{"schema": 99}\n', encoding="utf-8")
    with (
        open_history(tmp_path / "h.db") as history,
        pytest.raises(HistoryError, match="schema 99"),
    ):
        import_lines(history, path)
    with sqlite3.connect(tmp_path / "h.db") as connection:
        connection.execute("UPDATE history_schema SET version = 99")
    with pytest.raises(HistoryError, match=r"has schema 99.*update loragate"):
        open_history(tmp_path / "h.db")


def test_an_older_history_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scan_run: NewRun
) -> None:
    with open_history(tmp_path / "h.db") as history:
        history.add_run(scan_run())
    monkeypatch.setattr(tables, "SCHEMA", 2)
    monkeypatch.setattr(tables, "UPGRADES", {1: ["UPDATE scan_runs SET machine = 'upgraded'"]})
    for _ in range(2):
        with open_history(tmp_path / "h.db") as history:
            assert [run.machine for run in history.runs()] == ["upgraded"]
        # each step is done once
        monkeypatch.setattr(tables, "UPGRADES", {})


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nosuchdb://host/x", "nosuchdb"),
        ("mysql://host/x", "mysql|MySQL"),
        ("{tmp}", "must be a file or a URL"),
        ("", "history '': must be a file or a URL"),
        ("{tmp}/text.db", "not a database"),
        ("{tmp}/other.db", "no history"),
    ],
)
def test_what_is_no_history_is_refused(tmp_path: Path, where: str, message: str) -> None:
    (tmp_path / "text.db").write_text("this is no database" * 100, encoding="utf-8")
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    with pytest.raises(HistoryError, match=message):
        open_history(where.format(tmp=tmp_path))


def test_pruning_leaves_what_was_not_right(
    tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    with open_history(tmp_path / "h.db") as history:
        history.add_run(scan_run("old", started_at=1.0))
        history.add_run(scan_run("empty", started_at=1.0))
        history.add_run(scan_run("new", started_at=500.0))
        # one that is about to add its first trial
        history.add_run(scan_run("newest", started_at=600.0))
        history.add(trial(0, "old", at=1.0, path="another"))
        history.add(trial(1, "old", at=2.0, outcome=Outcome.DIFFERENT))
        history.add(trial(2, "old", at=3.0, path="another"))
        history.add(trial(0, "new", at=500.0, path="another"))
        # the first one of its case says which source ran, the last one that it was judged
        assert history.prune(before=400.0) == 1
        kept = [(t.run, t.number) for t in history.trials()]
        assert kept == [("old", 0), ("old", 1), ("new", 0)]
        assert [run.uid for run in history.runs()] == ["old", "new", "newest"]


@pytest.mark.parametrize("command", ["morning", "history prune --days 3", "history export lines"])
def test_a_history_that_is_only_read_is_not_made(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    first, *rest = command.split()
    assert main([first, "--history", "typo.db", *rest]) == ExitCode.USAGE
    assert "there is no history 'typo.db'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_pruning_leaves_results_that_differ_from_each_other(
    tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    with open_history(tmp_path / "h.db") as history:
        history.add_run(scan_run("old", started_at=1.0))
        for number, (key, draw, digest) in enumerate(
            [("x", 0, "a"), ("x", 0, "b"), ("y", 1, "c"), ("y", 1, "c"), ("y", 0, "d")]
        ):
            given = {"path": key, "path_key": key, "draw": draw, "digest": digest}
            history.add(trial(number, "old", case=key, at=1.0, **given))
        assert history.prune(before=400.0) == 1
        # and the first and the last one of the other source
        assert [t.digest for t in history.trials()] == ["a", "b", "c", "d"]


def _append(add: Records, path: Path, uid: str, count: int, ready: int) -> None:
    """In a process of its own: tells after each trial that it has been added."""
    with open_history(path) as history:
        history.add_run(add[0](uid))
        for number in range(count):
            history.add(add[1](number, uid))
            os.write(ready, b".")


def _fork_writer(add: Records, path: Path, uid: str, count: int) -> tuple[int, int]:
    heard, ready = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(heard)
        try:
            _append(add, path, uid, count, ready)
        finally:
            os._exit(0)
    os.close(ready)
    return process, heard


def test_several_processes_append_to_one_file(
    tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    writers = [_fork_writer((scan_run, trial), tmp_path / "h.db", f"run-{k}", 20) for k in range(3)]
    for process, heard in writers:
        _, status = os.waitpid(process, 0)
        os.close(heard)
        assert status == 0
    with open_history(tmp_path / "h.db") as history:
        assert history.count() == 60


def test_a_writer_killed_at_any_moment_loses_only_the_trial_that_it_was_writing(
    tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    random, told = Random(16), {}
    for moment in range(100):
        uid = f"run-{moment}"
        process, heard = _fork_writer((scan_run, trial), tmp_path / f"{moment // 10}.db", uid, 1000)
        told[uid] = len(os.read(heard, 1)) + len(os.read(heard, random.randrange(1, 8)))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        while rest := os.read(heard, 1000):
            told[uid] += len(rest)
        os.close(heard)
    for number in range(10):
        with open_history(tmp_path / f"{number}.db") as history:
            trials = list(history.trials())
        # each writer found what the killed one before it had left
        for uid in (f"run-{10 * number + k}" for k in range(10)):
            kept = [t.number for t in trials if t.run == uid]
            assert kept == list(range(len(kept)))
            assert told[uid] <= len(kept) <= told[uid] + 1


def test_a_team_keeps_its_history_in_postgresql(
    postgresql_url: str, tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    with open_history(tmp_path / "h.db") as local, open_history(postgresql_url) as shared:
        local.add_run(scan_run("b", environment={"torch": "2.13"}))
        for number in range(3):
            local.add(trial(number, "b", path="another", conditions={"memory": "zeros"}))
        shared.add_run(scan_run("a"))
        shared.add(trial(0, "a", outcome=Outcome.DIFFERENT))
        shared.add(trial(0, "a", outcome=Outcome.DIFFERENT))
        with pytest.raises(HistoryError, match="no run x"):
            shared.add(trial(run="x"))
        assert shared.merge(local) == 3
        assert shared.merge(local) == 0
        assert local.merge(shared) == 1
        assert list(shared.trials()) == list(local.trials())
        assert shared.prune(before=1e9) == local.prune(before=1e9) == 2
    # the tables are there now
    with open_history(postgresql_url) as shared:
        assert shared.count() == 2


_ANYTHING = {
    "message": "bad \ud800 \0 text",
    "case": "a\0b",
    "conditions": {"after": "\ud800", "\0": "x"},
}


def _check_that_anything_is_kept(history: History, add: NewTrial) -> None:
    history.add(add(7, "anything", **_ANYTHING))
    history.add_path(PathFiles(path_key="anything", files=("a\ud800.py",)))
    (kept,) = [trial for trial in history.trials() if trial.run == "anything"]
    assert kept.message == r"bad \ud800 \0 text"
    assert kept.case == r"a\0b"
    assert kept.conditions == {"after": r"\ud800", r"\0": "x"}
    assert [p.files for p in history.paths() if p.path_key == "anything"] == [(r"a\ud800.py",)]
    # nothing in it is refused elsewhere
    checked(TrialRecord, asdict(kept))


def test_a_text_that_no_database_takes_is_written_out(
    tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    with open_history(tmp_path / "h.db") as history:
        history.add_run(scan_run("anything", environment={"driver": "\ud800"}))
        _check_that_anything_is_kept(history, trial)
        assert history.runs()[0].environment == {"driver": r"\ud800"}


def test_postgresql_keeps_a_text_that_it_does_not_take(
    postgresql_url: str, scan_run: NewRun, trial: NewTrial
) -> None:
    with open_history(postgresql_url) as history:
        history.add_run(scan_run("anything"))
        _check_that_anything_is_kept(history, trial)


@pytest.mark.parametrize("database", ["SQLite", "PostgreSQL"])
def test_plans_get_the_same_from_a_part_of_each_trial_as_from_the_whole(
    database: str, request: pytest.FixtureRequest, tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    is_file = database == "SQLite"
    where = tmp_path / "h.db" if is_file else request.getfixturevalue("postgresql_url")
    with open_history(where) as history:
        history.add_run(scan_run("parts"))
        for number, key in enumerate(("k1", "k2", "", "k1")):
            history.add(trial(number, "parts", at=1e8 + number, path_key=key, case="parts"))
        conditions = {"neighbours": "1", "memory": "zeros"}
        history.add(trial(9, "parts", at=1e8 + 9, case="parts", path_key="", conditions=conditions))
        history.add(trial(10, "parts", at=1e8 + 10, conditions={"after": '"neighbours":'}))
        whole = [glance_at(each) for each in history.trials(since=1e8)]
        assert [each.is_alone for each in whole] == [True] * 4 + [False, True]
        assert list(history.glances(since=1e8)) == whole
        assert history.last_path_keys()["parts"] == "k1"


def test_a_postgresql_history_of_a_newer_version_is_refused(postgresql_url: str) -> None:
    with open_history(postgresql_url) as history, history._engine.begin() as connection:
        connection.execute(text("UPDATE history_schema SET version = 99"))
    try:
        with pytest.raises(HistoryError, match="has schema 99"):
            open_history(postgresql_url)
    finally:
        with history._engine.begin() as connection:
            connection.execute(text("UPDATE history_schema SET version = 1"))


def _killed(work: Callable[[], object], moment: float) -> None:
    """Begin `work` in a process of its own, and kill it after so many seconds."""
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(moment)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


@pytest.mark.parametrize("way", ["merge", "import", "prune", "export"])
def test_a_command_killed_at_any_moment_has_done_all_or_nothing(
    way: str, tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    here, there, lines = tmp_path / "here.db", tmp_path / "there.db", tmp_path / "there.jsonl"
    count, random, seen = 3000, Random(16), set()
    with open_history(there) as history:
        history.take([scan_run("b")], (), (trial(k, "b") for k in range(count)))
        whole = "".join(f"{line}\n" for line in export_lines(history))
        lines.write_text(whole, encoding="utf-8")
    arguments = {
        "merge": ["--history", str(here), "merge", str(there)],
        "import": ["--history", str(here), "import", str(lines)],
        "prune": ["--history", str(there), "prune", "--days", "1"],
        "export": ["--history", str(there), "export", str(tmp_path / "out")],
    }[way]
    for _ in range(8):
        _killed(lambda: main(["history", *arguments]), random.random() / 8)
        if way == "export":
            found = tmp_path / "out"
            assert not found.exists() or found.read_text(encoding="utf-8") == whole
            continue
        with open_history(here if way != "prune" else there) as history:
            seen.add(history.count())
    # the first and the last trial stay
    assert seen <= {2 if way == "prune" else 0, count}
    # and none of them is in the way of the next one
    assert main(["history", *arguments]) == ExitCode.OK


def test_a_full_disk_is_no_mistake_of_the_user(
    tmp_path: Path, scan_run: NewRun, trial: NewTrial, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "h.jsonl"
    with open_history(tmp_path / "h.db") as history:
        history.take([scan_run()], (), (trial(k) for k in range(1000)))
        lines.write_text("".join(f"{x}\n" for x in export_lines(history)), encoding="utf-8")
    other = tmp_path / "other.db"
    with open_history(other) as history:
        history.add_run(scan_run("before"))
    process = os.fork()
    if process == 0:
        # as a disk that has no more room
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, 1 << 17))
        os._exit(main(["history", "--history", str(other), "import", str(lines)]))
    _, status = os.waitpid(process, 0)
    said = capfd.readouterr().err
    assert os.waitstatus_to_exitcode(status) == ExitCode.INFRASTRUCTURE, said
    assert "other.db: (sqlite3.OperationalError)" in said
    assert "Traceback" not in said
    with open_history(other) as history:
        assert (history.count(), [run.uid for run in history.runs()]) == (0, ["before"])
