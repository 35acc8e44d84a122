"""Workers of one GPU share the memory that only few cases need."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from loragate.core.gpus import GpuShare, share_of_gpu
from loragate.core.verdict import ExitCode, Verdict
from loragate.execution.device_memory import WorkerMemory

GIB = 1 << 30

HOLDER = """
import sys, time
from filelock import FileLock
from loragate.core.gpus import GpuShare
from loragate.execution.device_memory import WorkerMemory
class Unlimited:
    total = 0
    def limit(self, size): pass
    def trim(self): pass
with WorkerMemory(GpuShare(8, 4), FileLock(sys.argv[1]), Unlimited()).reserve(int(sys.argv[2])):
    print("runs", flush=True)
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
def other_worker(tmp_path, subject_environment):
    """Another worker of the same GPU that runs a case until it is killed. It has 8 bytes of its
    own, and the reserve is 4 bytes."""
    started = []

    def start(case_bytes: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(tmp_path / "gpu.reserve"), str(case_bytes)]
        process = subprocess.Popen(
            command, env=subject_environment, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def memory_of(
    tmp_path: Path, own: int, reserve: int, allocator: Recorder | None = None
) -> WorkerMemory:
    return WorkerMemory(
        GpuShare(own, reserve), FileLock(tmp_path / "gpu.reserve"), allocator or Recorder()
    )


def ran(memory: WorkerMemory, case_bytes: int) -> threading.Event:
    """Set once a case of that size has had its memory."""
    done = threading.Event()

    def work() -> None:
        with memory.reserve(case_bytes):
            done.set()

    threading.Thread(target=work, daemon=True).start()
    return done


def test_a_case_that_fits_the_own_share_waits_for_no_large_case(tmp_path, other_worker):
    other_worker(9)
    assert ran(memory_of(tmp_path, 8, 4), 8).wait(30)


def test_a_large_case_waits_for_no_case_that_fits_its_own_share(tmp_path, other_worker):
    other_worker(8)
    assert ran(memory_of(tmp_path, 8, 4), 9).wait(30)


def test_a_large_case_waits_until_the_other_one_has_ended_or_its_worker_is_dead(
    tmp_path, other_worker
):
    holder = other_worker(9)
    entered = ran(memory_of(tmp_path, 8, 4), 9)
    assert not entered.wait(0.5)
    # not given back in order: the worker dies
    holder.kill()
    assert entered.wait(30)


def test_a_small_case_takes_no_reserve(tmp_path: Path) -> None:
    allocator = Recorder()
    with memory_of(tmp_path, 8 * GIB, 0, allocator).reserve(8 * GIB):
        allocator.calls.append("case")
    assert allocator.calls == ["limit 8", "case"]
    assert not (tmp_path / "gpu.reserve").exists()


def test_a_large_case_gets_the_reserve_and_leaves_nothing_cached_behind(tmp_path: Path) -> None:
    allocator = Recorder()
    memory = memory_of(tmp_path, 8 * GIB, 22 * GIB, allocator)
    for _ in range(2):
        with memory.reserve(8 * GIB + 1):
            allocator.calls.append("case")
    assert allocator.calls == ["limit 8", *["limit 30", "case", "trim", "limit 8"] * 2]


def test_a_large_case_that_fails_gives_the_reserve_back(tmp_path: Path) -> None:
    allocator = Recorder()
    memory = memory_of(tmp_path, 8 * GIB, 4 * GIB, allocator)
    with pytest.raises(KeyboardInterrupt), memory.reserve(100 * GIB):
        raise KeyboardInterrupt
    assert allocator.calls == ["limit 8", "limit 12", "trim", "limit 8"]
    assert ran(memory_of(tmp_path, 8, 4), 9).wait(30)


@pytest.mark.parametrize("workers", [2, 5, 8])
@pytest.mark.parametrize("largest", [GIB, 20 * GIB, 53 * GIB + 7])
def test_the_largest_case_has_its_memory_however_many_workers_there_are(tmp_path, workers, largest):
    allocator = Recorder()
    share = share_of_gpu(140 * GIB, workers, largest)
    with WorkerMemory(share, FileLock(tmp_path / "gpu.reserve"), allocator).reserve(largest):
        allowed = float(allocator.calls[-1].split()[1])
    assert largest / GIB <= allowed + 1e-5
    assert allowed <= 0.9 * 140


@pytest.mark.parametrize("largest", [GIB, 53 * GIB])
def test_workers_together_get_no_more_than_was_free_when_they_started(tmp_path, largest):
    allocator = Recorder()
    share = share_of_gpu(79 * GIB, 8, largest)
    with WorkerMemory(share, FileLock(tmp_path / "gpu.reserve"), allocator).reserve(300 * GIB):
        calls = [float(limit.split()[1]) for limit in allocator.calls]
    own, most = calls[0], max(calls)
    assert 7 * own + most <= 0.9 * 79 + 1e-4


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


@pytest.mark.drill(
    tried="A worker dies while it holds the memory that all workers of its GPU need",
    exit_code=ExitCode.WRONG,
    kept="results of all other cases, which get the memory",
)
def test_a_worker_that_dies_in_a_large_case_leaves_its_memory_to_the_others(
    drill, tmp_path, run_session
):
    session = run_session(
        tmp_path / "report",
        *("-n", "2", "-p", "fake_gpu"),
        matrix="one_dead.yaml",
        CUDA_VISIBLE_DEVICES="GPU-five",
        MEMORY_USE=str(tmp_path / "use"),
    )
    drill(session.exit_code, session.output)
    # every case is a large one to this GPU, whichever workers run them
    uses = "".join(path.read_text() for path in tmp_path.glob("use.*"))
    assert uses.count("more") == 3
    assert session.of_tokens(12).verdict is Verdict.FAIL
    assert {session.of_tokens(tokens).verdict for tokens in (21, 22)} == {Verdict.PASS}


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
