"""A file is written as a whole or not at all, where its user has it and as its user shares it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from loragate.core.files import write_atomically


def test_a_link_stays_and_leads_to_the_new_text(tmp_path: Path) -> None:
    target, link = tmp_path / "elsewhere" / "target.md", tmp_path / "link.md"
    target.parent.mkdir()
    link.symlink_to(target)
    for text in ("first", "second"):
        write_atomically(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert [path.name for path in target.parent.iterdir()] == ["target.md"]


def test_a_link_that_leads_to_itself_is_replaced(tmp_path: Path) -> None:
    link = tmp_path / "a.txt"
    link.symlink_to(link)
    write_atomically(link, "text")
    assert link.read_text() == "text"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_a_file_keeps_who_may_read_it(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.chmod(mode)
    write_atomically(path, "newer")
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]
