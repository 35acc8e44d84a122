"""Records of scans, where planted faults are found, and a PostgreSQL server for each session."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loragate.core.machine import select_interpreter
from loragate.history import Outcome, Purpose, ScanRun, TrialRecord

_PLANTED = Path(__file__).parent / "planted"
_ROOT = Path(__file__).parents[2]
# a server refuses to run as root
_SOMEBODY = "nobody"
_FOLDERS = "/usr/lib/postgresql"


def _binary(name: str) -> str | None:
    found = sorted(Path(_FOLDERS).glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


@pytest.fixture(scope="session")
def postgresql_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    initdb, server = _binary("initdb"), _binary("postgres")
    if not initdb or not server:
        pytest.skip("there is no PostgreSQL here (Debian: apt-get install postgresql)")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed (pip install 'loragate[postgresql]')")
    # a socket has a short path, and the folders of pytest are closed to others
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/pg.XXXXXX"], text=True).strip())
    as_user = {"user": _SOMEBODY} if os.getuid() == 0 else {}
    if as_user:
        shutil.chown(folder, _SOMEBODY)
    data = folder / "data"
    command = [
        initdb,
        "-D",
        str(data),
        "-U",
        "loragate",
        "-A",
        "trust",
        "-N",
        "--locale=C",
        "-E",
        "UTF8",
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=folder, **as_user)
    options = ["-D", str(data), "-k", str(folder), "-c", "listen_addresses=", "-F"]
    running = subprocess.Popen(
        [server, *options], stderr=subprocess.PIPE, text=True, cwd=folder, **as_user
    )
    try:
        assert running.stderr is not None
        for line in running.stderr:
            if "ready to accept connections" in line:
                break
        else:
            pytest.fail("the server ended before it was ready")
        yield f"postgresql+psycopg://loragate@/postgres?host={folder}"
    finally:
        # at once, without waiting for connections
        running.send_signal(signal.SIGINT)
        running.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def environment(preloaded: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In which the subjects with planted faults are found."""
    folders = [_PLANTED, _ROOT / "harness", _ROOT / "kernels", os.environ.get("PYTHONPATH", "")]
    # Triton reads its switch when it is imported, and later tests of this process interpret kernels
    select_interpreter()
    importlib.import_module("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
        # what cannot be seen cannot be used: these tests run on the CPU everywhere
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("planted")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


def _scan_run(uid: str = "night-1", **changes: Any) -> ScanRun:
    given: dict[str, Any] = {"machine": "host", "started_at": 1000.0, "commit": "c1"}
    return ScanRun(uid=uid, **given | changes)


def _trial(number: int = 0, run: str = "night-1", **changes: Any) -> TrialRecord:
    given: dict[str, Any] = {
        "at": 1000.0 + number,
        "case": "some.dense_delta.dtype-bf16",
        "subject": "some",
        "site": "dense_delta",
        "path": "dense_delta eager",
        "path_key": "key1",
        "grouped": "bf16",
        "device": "cpu",
        "draw": 0,
        "measure": "bits",
        "purpose": Purpose.PLANNED,
        "outcome": Outcome.RIGHT,
        "digest": "aa",
        "replay": "loragate replay some",
    }
    return TrialRecord(run=run, number=number, **given | changes)


@pytest.fixture(scope="session")
def scan_run() -> Callable[..., ScanRun]:
    return _scan_run


@pytest.fixture(scope="session")
def trial() -> Callable[..., TrialRecord]:
    return _trial
