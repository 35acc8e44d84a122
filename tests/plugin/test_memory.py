"""Workers of one GPU share the memory that only few cases need."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loragate.core.verdict import Verdict
from loragate.plugin.memory import SharedCapacity, WorkerMemory, divide

GIB = 1 << 30

BORROWER = """
import sys, time
from pathlib import Path
from loragate.plugin.memory import SharedCapacity
with SharedCapacity(Path(sys.argv[1]), 4).borrow(int(sys.argv[2])):
    print("holds", flush=True)
    time.sleep(600)
"""


class Recorder:
    """An allocator that records its calls."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.calls: list[str] = []

    def limit(self, size: int) -> None:
        self.calls.append(f"limit {size / GIB:g}")

    def trim(self) -> None:
        self.calls.append("trim")


@pytest.fixture
def borrow(tmp_path, subject_environment):
    """Another process that holds units of the same capacity until it is killed."""
    started = []

    def start(units: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BORROWER, str(tmp_path / "gpu.capacity"), str(units)]
        process = subprocess.Popen(
            command, env=subject_environment, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def borrowed(shared: SharedCapacity, units: int) -> threading.Event:
    """Set once the units were borrowed and returned."""
    done = threading.Event()

    def work() -> None:
        with shared.borrow(units):
            done.set()

    threading.Thread(target=work, daemon=True).start()
    return done


def test_cases_that_fit_side_by_side_do_not_wait_for_each_other(tmp_path, borrow):
    borrow(2)
    assert borrowed(SharedCapacity(tmp_path / "gpu.capacity", 4), 2).wait(30)


def test_a_case_waits_for_the_memory_of_another_worker_until_that_is_given_back(tmp_path, borrow):
    holder = borrow(2)
    entered = borrowed(SharedCapacity(tmp_path / "gpu.capacity", 4), 3)
    assert not entered.wait(0.5)
    # not given back in order: the worker dies
    holder.kill()
    assert entered.wait(30)


def test_a_small_case_borrows_nothing(tmp_path: Path) -> None:
    allocator = Recorder()
    memory = WorkerMemory(8 * GIB, SharedCapacity(tmp_path / "gpu.capacity", 0), allocator)
    with memory.reserve(8 * GIB):
        allocator.calls.append("case")
    assert allocator.calls == ["limit 8", "case"]
    assert not (tmp_path / "gpu.capacity").exists()


def test_a_large_case_gets_its_memory_and_leaves_nothing_cached_behind(tmp_path: Path) -> None:
    allocator = Recorder()
    memory = WorkerMemory(8 * GIB, SharedCapacity(tmp_path / "gpu.capacity", 100), allocator)
    with memory.reserve(30 * GIB + 1):
        allocator.calls.append("case")
    assert allocator.calls == ["limit 8", "limit 30.25", "case", "trim", "limit 8"]


def test_a_case_beyond_all_memory_gets_what_there_is(tmp_path: Path) -> None:
    allocator = Recorder()
    memory = WorkerMemory(8 * GIB, SharedCapacity(tmp_path / "gpu.capacity", 16), allocator)
    with memory.reserve(100 * GIB):
        pass
    assert allocator.calls[1] == "limit 12"


@pytest.mark.parametrize("workers", [2, 5, 8])
@pytest.mark.parametrize("largest", [GIB, 20 * GIB, 53 * GIB + 7])
def test_the_largest_case_has_its_memory_however_many_workers_there_are(tmp_path, workers, largest):
    allocator = Recorder(140 * GIB)
    with divide(tmp_path / "gpu.capacity", workers, largest, allocator, free=0).reserve(largest):
        allowed = float(allocator.calls[-1].split()[1])
    assert largest / GIB <= allowed <= 0.9 * 140


@pytest.mark.parametrize("largest", [GIB, 53 * GIB])
def test_workers_together_get_no_more_than_was_free_when_they_started(tmp_path, largest):
    allocator = Recorder(139 * GIB)
    with divide(tmp_path / "gpu.capacity", 8, largest, allocator, free=79 * GIB).reserve(300 * GIB):
        calls = [float(limit.split()[1]) for limit in allocator.calls]
    own, most = calls[0], max(calls)
    assert 7 * own + most <= 0.9 * 79


def test_what_another_process_holds_of_a_gpu_is_not_divided(tmp_path, run_session):
    # a third of what the allocator takes for all there is
    session = run_session(
        tmp_path / "report",
        *("-n", "2", "-p", "fake_gpu", "--loragate-subject=torch", "--loragate-cases=torch.*"),
        matrix="four_good.yaml",
        CUDA_VISIBLE_DEVICES="GPU-five",
        MEMORY_USE=str(tmp_path / "use"),
        FAKE_GPUS="GPU-five:512",
    )
    assert session.exit_code == 0, session.output
    uses = [path.read_text().split() for path in tmp_path.glob("use.*")]
    assert len(uses) == 2
    assert not any("more" in use for use in uses)


def test_only_workers_of_one_gpu_divide_it_and_return_what_they_borrowed(tmp_path, run_session):
    session = run_session(
        tmp_path / "report",
        *("-n", "3", "-p", "fake_gpu", "--loragate-subject=torch", "--loragate-cases=torch.*"),
        matrix="four_good.yaml",
        CUDA_VISIBLE_DEVICES="5,7",
        MEMORY_USE=str(tmp_path / "use"),
    )
    assert session.exit_code == 0, session.output
    # the third worker is alone on the second GPU
    uses = {path.suffix: path.read_text().split() for path in tmp_path.glob("use.*")}
    assert uses.keys() == {".gw0", ".gw2"}
    for use in uses.values():
        cases = len(use) // 3
        assert use == ["less", *["more", "trim", "less"] * cases]
    ran = [event for event in session.finished if event.worker in ("gw0", "gw2")]
    assert len(ran) == sum(len(use) // 3 for use in uses.values())


def test_waiting_for_memory_does_not_count_against_the_deadline_of_a_case(tmp_path, run_session):
    session = run_session(
        tmp_path / "report",
        *(
            "-n",
            "1",
            "-p",
            "slow_memory",
            "--loragate-subject=torch",
            "--loragate-cases=torch.*-13",
        ),
        matrix="one_hang.yaml",
    )
    # its deadline is 2 s
    assert session.of_tokens(13).verdict is Verdict.PASS, session.output
