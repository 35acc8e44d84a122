"""The process that engines are forked from: what they share, and when there is another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from loragate.core.gpus import cuda_is_initialised
from loragate.engine.process import EngineError, EngineProcess
from loragate.engine.requests import Request

from .small_order import ORDER

ENGINES = '''
import os
import time
from pathlib import Path

from loragate.engine.requests import EngineCounts

PRELOADED = []
USED = []
with Path(__file__).with_name("imports").open("a") as file:
    print("imported", file=file)


def preload():
    PRELOADED.append(os.getpid())
    with Path(__file__).with_name("imports").open("a") as file:
        print("preloaded", file=file)
    fail_to_preload()


def fail_to_preload():
    pass


class Engine:
    """Counts the engines that were made in its process, and the preloads of another process."""

    def __init__(self, order):
        USED.append(order)

    def load(self, name, folder):
        pass

    unload = load

    def generate(self, requests):
        while requests[0].adapter == "hang":
            time.sleep(0.1)
        raise ValueError("no answer")

    def counts(self):
        elsewhere = [process for process in PRELOADED if process != os.getpid()]
        return EngineCounts(len(USED), os.getpid(), len(elsewhere), None)

    def close(self):
        pass
'''
Start = Callable[[], EngineProcess]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "forked_engines.py").write_text(ENGINES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Start:
    def started() -> EngineProcess:
        log = folder / "engine.log"
        return EngineProcess("forked_engines:Engine", ORDER, deadline_s=240.0, log=log)

    return started


def imports(folder: Path) -> list[str]:
    return (folder / "imports").read_text().split()


def process_of(engine: EngineProcess) -> psutil.Process:
    pid = engine.counts().drafts_rejected
    assert pid is not None
    return psutil.Process(pid)


def test_engines_share_what_was_imported_and_nothing_that_an_engine_did(
    start: Start, folder: Path
) -> None:
    processes = set()
    for _ in range(3):
        with start() as engine:
            counts = engine.counts()
        assert (counts.drafts_accepted, counts.graphs_replayed) == (1, 1)
        processes.add(counts.drafts_rejected)
    assert len(processes) == 3
    assert imports(folder) == ["imported", "preloaded"]


def test_two_engines_at_a_time_have_nothing_in_common(start: Start, folder: Path) -> None:
    with start() as one, start() as other:
        parents = {process_of(engine).ppid() for engine in (one, other)}
    assert len(parents) == 2
    assert imports(folder) == ["imported", "preloaded"] * 2
    # one of their servers is kept, and the other one has ended
    with start() as engine:
        kept = process_of(engine).ppid()
    assert len(imports(folder)) == 4
    (ended,) = parents - {kept}
    assert not psutil.pid_exists(ended)


@pytest.mark.parametrize("adapter", ["hang", "fail"])
def test_the_engine_after_one_that_did_not_end_by_itself_is_forked_from_another_process(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, adapter: str
) -> None:
    engine = start()
    server = process_of(engine).parent()
    assert server is not None
    monkeypatch.setattr(engine, "_left_s", 0.2 if adapter == "hang" else 240.0)
    with pytest.raises(EngineError), engine:
        engine.generate([Request((1,), adapter, 1)])
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    with start() as engine:
        assert engine.counts().drafts_accepted == 1
    assert imports(folder) == ["imported", "preloaded"] * 2


@pytest.mark.parametrize("when", ["between engines", "under an engine"])
def test_a_server_that_somebody_has_killed_is_replaced(
    start: Start, folder: Path, when: str
) -> None:
    with start() as engine:
        server = process_of(engine).parent()
        assert server is not None
        if when == "under an engine":
            server.kill()
    if when == "between engines":
        server.kill()
        server.wait()
    with start() as engine:
        assert engine.counts().drafts_accepted == 1
    assert len(imports(folder)) == 4


@pytest.mark.parametrize("changed", ["variable", "folder", "path"])
def test_an_engine_sees_the_variables_the_folder_and_the_path_of_now(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    with start():
        pass
    if changed == "variable":
        monkeypatch.setenv("AN_OPTION_OF_A_PACKAGE", "1")
    elif changed == "folder":
        monkeypatch.chdir(folder)
    else:
        (folder / "planted").mkdir()
        (folder / "planted" / "forked_engines.py").write_text(ENGINES)
        monkeypatch.syspath_prepend(str(folder / "planted"))
    with start() as engine:
        server = process_of(engine).parent()
        assert server is not None
        if changed == "variable":
            assert server.environ()["AN_OPTION_OF_A_PACKAGE"] == "1"
        elif changed == "folder":
            assert Path(server.cwd()) == folder
        else:
            assert imports(folder / "planted") == ["imported", "preloaded"]


def test_a_preload_that_fails_leaves_it_to_the_engine_to_fail(start: Start, folder: Path) -> None:
    with (folder / "forked_engines.py").open("a") as file:
        file.write("\n\ndef fail_to_preload():\n    raise ImportError('no such package')\n")
    with start() as engine:
        assert engine.counts().drafts_accepted == 1
        assert "no such package" in engine.log_tail()


def test_a_module_that_uses_the_gpu_when_it_is_imported_is_imported_for_each_engine(
    start: Start, folder: Path
) -> None:
    assert not cuda_is_initialised()
    # what the server asks behind its imports
    used = "\n\nimport __main__\n\n__main__.cuda_is_initialised = lambda: True\n"
    with (folder / "forked_engines.py").open("a") as file:
        file.write(used)
    for _ in range(2):
        with start() as engine:
            counts = engine.counts()
        # of its own process
        assert (counts.drafts_accepted, counts.graphs_replayed) == (1, 0)
    assert imports(folder) == ["imported", "preloaded"] * 2
