"""What tests of several folders share: signals as a user has them, and drills.

A drill is a test that breaks a run on purpose with the real command and compares how it ends.
docs/reliability.md lists all of them; `./ci/drills` runs them.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from loragate.records.recorder import Recorder

# imported where it is used: with a planted fault the tests of a folder run without the others
sys.path.append(str(Path(__file__).parent / "preloaded"))

# the same test takes a hundred times as long on a machine that is busy: no time is asserted
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

_MARKER = (
    "drill(tried, exit_code, kept): a test that breaks a run on purpose; it compares the exit "
    "code by calling the fixture `drill`, and docs/reliability.md shows the three texts"
)


@dataclass(slots=True, kw_only=True)
class Drill:
    """`tried` says what is done, `kept` what is left of the run; both are shown to readers."""

    tried: str
    exit_code: int
    kept: str
    compared: bool = field(default=False, init=False)

    def __call__(self, exit_code: int, output: str = "") -> None:
        """Compare how the command ended."""
        self.compared = True
        assert exit_code == self.exit_code, output
        assert "Traceback (most recent call last)" not in output, output


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """A test that leaves the garbage collector off changes those behind it in its process: one did,
    and another one failed wherever it came later."""
    yield
    is_on = gc.isenabled()
    gc.enable()
    assert is_on, "the test has left the garbage collector off"


@pytest.fixture(autouse=True)
def uninitialised_memory() -> Iterator[None]:
    """What `torch.empty` returns holds NaN, or the largest integer, in the body of a test: the
    zeros that it mostly holds otherwise hide a reset that is missing. Not with a GPU, where a
    captured graph would have kernels that fill memory."""
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_available():
        yield
        return
    from loragate.inputs.poison import marked_allocations

    with marked_allocations(warn_only=True):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """What is loaded by now stays loaded, so the garbage collector need not visit it again: with
    all tests collected each full collection takes a second, and some oracles ask for one."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-drills", type=Path, metavar="FILE", help="record how the drills ended in FILE"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    # runs that are broken on purpose are no part of a CI step
    os.environ.pop("GITHUB_STEP_SUMMARY", None)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Drills(config.option.record_drills), "drills")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    drill = _drill_of(item)
    if drill is not None:
        # travels with the report from a worker to the process that records
        facts = {"tried": drill.tried, "exit_code": int(drill.exit_code), "kept": drill.kept}
        item.user_properties.append(("drill", facts))


@pytest.fixture(scope="session")
def preloaded_server() -> Any:
    from preloaded import Server

    return Server.start()


@pytest.fixture(scope="module")
def preloaded(preloaded_server: Any) -> Iterator[None]:
    """Processes of Python, and those that they start, begin with torch imported; see
    preloaded/preloaded.py. For a module whose tests start several."""
    with preloaded_server.in_use():
        yield


@pytest.fixture(name="started_anew")
def _started_anew() -> Iterator[None]:
    """For a test, in such a module, of how a process starts, of all that it imports, or of what
    the system says of it."""
    from preloaded import started_anew

    with started_anew():
        yield


@pytest.fixture
def plain_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay commands begin with `loragate`, whichever environment and path the tests run with."""
    monkeypatch.setenv("LORAGATE_COMMAND", "loragate")
    monkeypatch.delenv("LORAGATE_PYTHON", raising=False)


@pytest.fixture
def drill(request: pytest.FixtureRequest) -> Iterator[Drill]:
    """The drill that the test's marker declares; call it with the exit code of the command."""
    found = _drill_of(request.node)
    assert found is not None, "the test has no marker `drill`"
    yield found
    assert found.compared, "the drill compared no exit code"


def _drill_of(item: pytest.Item) -> Drill | None:
    marker = item.get_closest_marker("drill")
    return None if marker is None else Drill(**marker.kwargs)


class _Drills:
    """Collects how drills ended; records them if all of them ran."""

    def __init__(self, record: Path | None) -> None:
        self._recorder = Recorder.open(record, "drills") if record else None
        self._collected: set[str] = set()
        self._ended: dict[str, dict[str, Any]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        facts = dict(report.user_properties).get("drill")
        if facts is None:
            return
        row = self._ended.setdefault(report.nodeid, {**facts, "outcome": "passed", "seconds": 0.0})
        row["seconds"] = round(row["seconds"] + report.duration, 1)
        if not report.passed:
            row["outcome"] = report.outcome

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if terminalreporter.config.option.markexpr != "drill":
            return
        for name, row in sorted(self._ended.items()):
            ended = f"{row['outcome']:<8}{row['seconds']:>6.1f} s  exit {row['exit_code']:>3}"
            terminalreporter.write_line(f"{ended}  {row['tried']}  ({name.rpartition('::')[2]})")
        if terminalreporter.config.option.keyword or self._collected - self._ended.keys():
            terminalreporter.write_line("not recorded: not every drill ran")
        elif self._recorder is not None:
            self._recorder.save({"drills": dict(sorted(self._ended.items()))})


@pytest.fixture
def heeded_signals() -> Iterator[None]:
    """Signals that end a process do so, also where whoever started the tests ignores them, as
    nohup and a shell's background jobs do. Processes that a test starts inherit that."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            heeded = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, heeded)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
