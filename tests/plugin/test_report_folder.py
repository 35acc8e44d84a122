"""A new report takes the place of an old one, which is kept."""

from __future__ import annotations

from loragate.run.folder import clear_folder


def test_a_folder_that_is_not_there_is_made(tmp_path):
    clear_folder(tmp_path / "a" / "report")
    assert list((tmp_path / "a" / "report").iterdir()) == []


def test_the_files_of_an_earlier_run_are_kept_under_its_name(tmp_path):
    files = {
        "events.jsonl": '{"run": "r1"}\n',
        "index.html": "old",
        "junit.xml": "<old/>",
        "logs/host.log": "log",
        "workers/gw0.stack": "stack",
        "workers/kernels/gw1.stack": "stack of a leg",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    clear_folder(tmp_path)
    kept = {name: (tmp_path / "previous" / "r1" / name).read_text() for name in files}
    assert kept == files
    assert [path.name for path in tmp_path.iterdir()] == ["previous"]


def test_two_earlier_runs_of_one_name_are_both_kept(tmp_path):
    for text in ("first", "second"):
        (tmp_path / "events.jsonl").write_text('{"run": "r1"}\n')
        (tmp_path / "index.html").write_text(text)
        clear_folder(tmp_path)
    kept = sorted(path.read_text() for path in tmp_path.glob("previous/*/index.html"))
    assert kept == ["first", "second"]


def test_a_report_with_a_torn_record_is_kept_too(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"run": "r')
    clear_folder(tmp_path)
    assert (tmp_path / "previous" / "unnamed" / "events.jsonl").exists()


def test_a_name_that_leads_elsewhere_is_not_followed(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"run": "../../elsewhere"}\n')
    clear_folder(tmp_path)
    assert (tmp_path / "previous" / "unnamed" / "events.jsonl").exists()


def test_what_others_have_put_there_stays(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "events.jsonl").write_text('{"run": "r1"}\n')
    clear_folder(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
