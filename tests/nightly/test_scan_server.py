"""The process that forks those of a scan: what it has imported by then."""

from __future__ import annotations

from types import SimpleNamespace
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
    # on a machine with a GPU, another test of this process may have initialised CUDA
    monkeypatch.setattr(server, "_has_initialised_cuda", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
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


def test_imports_that_initialise_cuda_are_left_to_the_forks(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_has_initialised_cuda", lambda: True)
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


@pytest.mark.parametrize(("status", "is_initialised"), [(3, False), (0, True), (201, True)])
def test_the_driver_says_whether_cuda_is_initialised(
    status: int, is_initialised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SimpleNamespace(cuCtxGetCurrent=lambda context: status)
    monkeypatch.setattr(server.ctypes, "CDLL", lambda name: driver)
    assert server._has_initialised_cuda() == is_initialised


def test_without_a_driver_cuda_is_not_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(server.ctypes, "CDLL", missing)
    assert not server._has_initialised_cuda()
