"""The process that forks those of a scan: what it has imported by then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from loragate.scan import server


class _ReplacedError(Exception):
    """The process was replaced by another one."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def replace_process(path: str, command: tuple[str, ...]) -> None:
        found.append(list(command[1:]))
        raise _ReplacedError

    monkeypatch.setattr(server, "import_subjects", lambda names: found.append(("import", names)))
    monkeypatch.setattr(server, "_load", lambda names: found.append(("load", names)))
    monkeypatch.setattr(server, "_answer", lambda **what: found.append(what))
    monkeypatch.setattr(server._Server, "serve", lambda self: None)
    monkeypatch.setattr(server.gc, "freeze", lambda: None)
    monkeypatch.setattr(server.signal, "set_wakeup_fd", lambda fd: None)
    monkeypatch.setattr(server.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(server.os, "execv", replace_process)
    return found


def test_forks_find_their_subjects_imported(calls: list[Any]) -> None:
    server.main(["torch", "lorakernels"])
    names = ["torch", "lorakernels"]
    assert calls == [("import", names), ("load", names), {"ready": True}]


def test_imports_that_open_the_gpu_are_left_to_the_forks(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_has_opened_the_device", lambda: True)
    with pytest.raises(_ReplacedError):
        server.main(["torch"])
    again = calls[-1]
    assert again == ["-m", "loragate.scan.server", "--fewer-imports", "torch"]
    # and that one is not replaced again
    calls.clear()
    server.main(again[2:])
    assert calls == [("load", ["torch"]), {"ready": True}]


def test_a_subject_is_not_asked_about_the_gpu_before_the_forks(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    server.main(["torch"])
    assert calls == [("import", ["torch"]), {"ready": True}]


def test_a_process_that_has_opened_the_gpu_is_known_by_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not server._has_opened_the_device()
    monkeypatch.setattr(server, "_DEVICE", str(tmp_path / "nvidia-uvm"))
    with (tmp_path / "nvidia-uvm-tools").open("w") as file:
        assert os.readlink(f"/proc/self/fd/{file.fileno()}") == file.name
        assert server._has_opened_the_device()
    assert not server._has_opened_the_device()
