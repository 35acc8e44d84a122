"""Parts of a scan without a scan: digests, paths, messages, outcomes, clocks, health of a GPU."""

from __future__ import annotations

import json
import time
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from torch import Tensor

from loragate.commands.scan import _for_page
from loragate.core.checkout import project_root
from loragate.core.gpu_health import NoHealth, NvmlHealth, open_health
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.history import Outcome
from loragate.inputs.poison import poisoned_allocations, zeroed_allocations
from loragate.matrix.case_run import CaseRun
from loragate.matrix.load import load_cases
from loragate.nightly.conditions import Clock, Conditions
from loragate.nightly.wave import Measure, Wanted
from loragate.scan import paths
from loragate.scan.bits import digest_of
from loragate.scan.child import _clocks, _shown, outcome_of
from loragate.scan.messages import Began, Measured, Order, Step, Unpacker, packed
from loragate.scan.paths import TracedPath, _content, path_of_engine, traced_path
from loragate.scan.processes import Process
from loragate.scan.running import Running
from loragate.subjects.torch.subject import DenseDelta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_digest_is_of_the_bits_and_not_of_strides_or_values(dtype: torch.dtype) -> None:
    tensor = torch.arange(12, dtype=dtype).reshape(3, 4)
    assert digest_of(tensor) == digest_of(tensor.clone())
    assert digest_of(tensor.t()) == digest_of(tensor.t().contiguous())
    zeros = torch.zeros(4, dtype=dtype)
    assert digest_of(zeros) != digest_of(-zeros)
    assert digest_of(torch.full((4,), torch.nan, dtype=dtype)) != digest_of(zeros)
    assert digest_of(torch.tensor(1.0)) != digest_of(torch.tensor(2.0))


def test_messages_arrive_whole_however_a_pipe_cuts_them() -> None:
    data = packed(Began(index=1, device="cpu")) + packed(Began(index=2, device="cpu"))
    unpacker = Unpacker()
    heard = [m for k in range(len(data)) for m in unpacker.feed(data[k : k + 1])]
    assert heard == [Began(index=1, device="cpu"), Began(index=2, device="cpu")]
    # what is torn is never given
    assert list(Unpacker().feed(data[:-1])) == [Began(index=1, device="cpu")]


def _running(folder: Path, conditions: Conditions) -> Running:
    """A process of three trials."""
    case = next(iter(load_cases((project_root() / "cases" / "dense_delta.yaml",))))
    steps = tuple(
        Step(run=CaseRun(subject="torch", case=case, draw=draw), measure=Measure.BITS)
        for draw in range(3)
    )
    order = Order(steps=steps, conditions=conditions, folder=folder, wave=folder, number=0, peers=1)
    return Running(Process(0, order, pipe=-1), order, 0, started=0.0)


def _right(index: int) -> Measured:
    return Measured(
        index=index,
        outcome=Outcome.RIGHT,
        failure="",
        message="",
        digests=(),
        duration_s=0.1,
        promised=True,
    )


def test_what_is_heard_of_a_trial_costs_the_same_however_many_its_process_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a scan of 24,000 trials spent a fifth of its time on lists of up to a thousand for each
    listed: list[Wanted] = []

    def wanted(**fields: Any) -> Wanted:
        listed.append(Wanted(**fields))
        return listed[-1]

    monkeypatch.setattr("loragate.scan.running.Wanted", wanted)
    running = _running(tmp_path, Conditions())
    for index in range(3):
        running.hear(Began(index=index, device="cpu"))
        assert running.left == tuple(listed[index:])
        running.hear(_right(index))
        assert running.wanted[index].draw == index
    assert len(listed) == 3


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (-11, "the process of the trial died of SIGSEGV behind it"),
        (3, "the process of the trial exited with 3 behind it"),
        (0, None),
    ],
)
def test_a_process_that_dies_between_trials_is_charged_to_the_one_before(
    status: int, message: str | None, tmp_path: Path
) -> None:
    running = _running(tmp_path, Conditions())
    process = running.process
    right = _right(1)
    assert running.hear(Began(index=1, device="cpu")) is None
    assert running.hear(right) == right
    process.status = status
    ended = running.hear(None)
    if message is None:
        assert ended is None
    else:
        assert ended is not None
        assert (ended.index, ended.outcome) == (1, Outcome.WRONG)
        assert message in ended.message


@pytest.mark.parametrize(
    ("clock", "outcome"),
    [(Clock.PLAIN, Outcome.WRONG), (Clock.SLOW, Outcome.UNKNOWN), (Clock.FAST, Outcome.UNKNOWN)],
)
def test_a_hang_says_nothing_where_clocks_run_at_another_speed(
    clock: Clock, outcome: Outcome, tmp_path: Path
) -> None:
    running = _running(tmp_path, Conditions(clock=clock))
    running.order.stacks.write_text("Timeout (0:00:09)!\n", encoding="utf-8")
    running.hear(Began(index=0, device="cpu"))
    running.process.status = 1
    ended = running.hear(None)
    assert ended is not None
    assert (ended.outcome, ended.failure) == (outcome, Failure.HANG)
    # what ends the process at once is no matter of time
    running.order.stacks.write_text("", encoding="utf-8")
    running.hear(Began(index=0, device="cpu"))
    running.process.status = -11
    ended = running.hear(None)
    assert ended is not None
    assert (ended.outcome, ended.failure) == (Outcome.WRONG, Failure.CRASH)


@pytest.mark.parametrize(
    ("verdict", "failures", "outcome"),
    [
        (Verdict.PASS, [], Outcome.RIGHT),
        (Verdict.FAIL, [Failure.NONDETERMINISTIC], Outcome.DIFFERENT),
        (Verdict.FAIL, [Failure.NONDETERMINISTIC, Failure.WRONG_ANSWER], Outcome.WRONG),
        (Verdict.FAIL, [Failure.HANG], Outcome.WRONG),
        (Verdict.INFRA, [Failure.OUT_OF_MEMORY], Outcome.INFRA),
        (Verdict.INCONCLUSIVE, [], Outcome.UNKNOWN),
    ],
)
def test_an_outcome_differs_only_if_nothing_is_wrong(
    verdict: Verdict, failures: list[Failure], outcome: Outcome
) -> None:
    assert outcome_of(verdict, failures) is outcome


def test_an_oracle_that_lacks_memory_makes_no_difference_wrong() -> None:
    differs = Judgement(OracleName.REPEAT, Verdict.FAIL, Failure.NONDETERMINISTIC)
    lacks = Judgement(OracleName.REFERENCE, Verdict.INFRA, Failure.OUT_OF_MEMORY)
    assert _shown((lacks, differs))["outcome"] is Outcome.DIFFERENT


def test_clocks_run_slowly_or_fast_and_are_put_back() -> None:
    true = time.perf_counter
    with _clocks(Clock.SLOW):
        begin, real = time.perf_counter(), true()
        while true() - real < 0.01:
            pass
        passed = true() - real
        assert 0 < time.perf_counter() - begin < passed / 100
        assert isinstance(time.time_ns(), int)
    with _clocks(Clock.FAST):
        begin, real = time.perf_counter(), true()
        while true() - real < 0.002:
            pass
        assert time.perf_counter() - begin >= 1.9
    assert time.perf_counter is true


@pytest.mark.parametrize("clock", [Clock.SLOW, Clock.FAST])
@pytest.mark.parametrize("name", ["perf_counter", "monotonic_ns", "time"])
def test_a_clock_goes_on_with_each_reading_at_any_speed(clock: Clock, name: str) -> None:
    with _clocks(clock):
        readings = [getattr(time, name)() for _ in range(100)]
    assert all(later > earlier for earlier, later in pairwise(readings))


def test_fresh_memory_holds_what_was_asked_for() -> None:
    with zeroed_allocations():
        assert not torch.empty(1000).any()
        assert not torch.ones(3).new_empty(1000, dtype=torch.int32).any()
    with poisoned_allocations():
        assert torch.empty(1000).isnan().all()


@pytest.mark.parametrize("above", ["", "def serve():\n    ", "if True:\n    "])
def test_the_key_of_an_engine_is_all_source_of_the_packages_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, above: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "planted_package"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "deep.py").write_text("VALUE = 1\n", encoding="utf-8")
    module = tmp_path / "planted_engine.py"
    source = f"import json\n{above}from planted_package.deep import VALUE\n"
    module.write_text(source, encoding="utf-8")
    _content.cache_clear()
    keys = [path_of_engine("planted_engine:serve").key()]
    assert set(path_of_engine("planted_engine:serve").files) == {
        str(file) for file in (module, package / "__init__.py", package / "deep.py")
    }
    for changed in (package / "deep.py", module):
        changed.write_text(changed.read_text(encoding="utf-8") + "# other\n", encoding="utf-8")
        _content.cache_clear()
        keys.append(path_of_engine("planted_engine:serve").key())
    assert len(set(keys)) == 3
    assert path_of_engine("no_such_module:serve").key() == ""


def _traced(source: Path) -> TracedPath:
    code = compile(source.read_text(encoding="utf-8"), str(source), "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    with traced_path() as path:
        names["run"]()
    return path


def test_the_key_of_a_path_is_the_source_that_was_entered(tmp_path: Path) -> None:
    keys = []
    for k, body in enumerate(("return 1", "return 1", "return 2")):
        folder = tmp_path / str(k)
        folder.mkdir()
        (folder / "mine.py").write_text(f"def run():\n    {body}\n", encoding="utf-8")
        path = _traced(folder / "mine.py")
        assert path.relative_files() == (str(folder / "mine.py"),)
        keys.append(path.key())
    assert keys[0] == keys[1] != keys[2]


def test_the_harness_torch_and_the_standard_library_belong_to_no_path() -> None:
    with traced_path() as path:
        json.loads("[1]")
        digest_of(torch.ones(3))
        torch.nn.functional.dropout(torch.ones(3))
    assert (path.files, path.key()) == ({}, "")


@pytest.mark.parametrize(("name", "is_own"), [("torch", False), ("torchaway", True)])
def test_packages_that_are_reached_through_a_link_belong_to_no_path(
    name: str, is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lib" / "site-packages" / name
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text("def run():\n    return 1\n", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "lib", target_is_directory=True)
    found = tmp_path / "link" / "site-packages" / "torch" / "__init__.py"
    monkeypatch.setattr(paths, "find_spec", lambda name: ModuleSpec(name, None, origin=str(found)))
    for cache in (paths._foreign_folders, paths._is_own):
        cache.cache_clear()
    try:
        assert bool(_traced(folder / "mine.py").files) is is_own
    finally:
        for cache in (paths._foreign_folders, paths._is_own):
            cache.cache_clear()


def test_a_path_names_the_kernels_that_it_launches_and_their_files() -> None:
    # through the subject, as scans do it
    from loragate.core.machine import select_interpreter

    select_interpreter()
    from loragate.matrix.case_run import CaseRun
    from loragate.run.trial import open_trial
    from loragate.scan.bits import Bits

    cases = load_cases((project_root() / "cases" / "dense_delta.yaml",))
    case = next(c for c in cases if c.tier == "smoke" and c.tokens == 2 and c.mix == "ragged")
    trial = open_trial(CaseRun("lorakernels", case))
    assert not isinstance(trial, str)
    path = TracedPath()

    def tracing() -> Any:
        nonlocal path
        context = traced_path()
        path = context.__enter__()
        return _Leaving(context)

    bits = Bits(tracing=tracing)
    assert bits.judge(trial).verdict is Verdict.PASS
    assert len(set(bits.digests)) == 1
    name = path.name(case)
    assert name.startswith("dense_delta eager prepare_kernel+lora_shrink_kernel")
    files = path.relative_files()
    assert "kernels/lorakernels/dense/kernels.py" in files
    # a function of Triton that a kernel calls
    assert any(file.startswith("kernels/lorakernels/common/") for file in files)
    assert not any(file.startswith("harness/loragate/oracles") for file in files)


def test_a_kernel_that_is_launched_in_its_compiled_form_belongs_to_its_path() -> None:
    from triton.compiler import CompiledKernel

    def planted_kernel() -> None: ...

    compiled = CompiledKernel.__new__(CompiledKernel)
    # loaded, so that a launcher needs no device
    compiled.module = object()
    compiled.src = SimpleNamespace(fn=SimpleNamespace(fn=planted_kernel, cache_key="its hash"))
    of_ir = CompiledKernel.__new__(CompiledKernel)
    of_ir.module, of_ir.src = object(), SimpleNamespace(name="@of_ir")
    of_ir.name, of_ir.hash = "of_ir", "that of the IR"
    with traced_path() as path:
        compiled[(1, 1, 1)]
        of_ir[(1, 1, 1)]
    assert path.kernels == {"planted_kernel": "its hash", "of_ir": "that of the IR"}
    assert list(path.files) == [__file__]


class _Leaving:
    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def test_a_subject_of_the_harness_belongs_to_its_path() -> None:
    with traced_path() as path:
        DenseDelta.unload(SimpleNamespace(slots={}), 3)  # type: ignore[arg-type]
    assert path.relative_files() == ("harness/loragate/subjects/torch/subject.py",)


class _FakeNvml:
    """A GPU that counts its errors; what it does not report raises, as NVML does."""

    def __init__(self) -> None:
        self.corrected = 5
        self.xids: list[int] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
            "nvmlDeviceGetHandleByIndex": lambda index: f"index {index}",
            "nvmlDeviceGetClockInfo": lambda gpu, kind: 1980 if kind == 1 else 3200,
            "nvmlDeviceGetTemperature": lambda gpu, kind: 41,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 4,
            "nvmlDeviceGetMemoryInfo": self._unsupported,
            "nvmlDeviceGetTotalEccErrors": self._errors,
            "nvmlEventSetCreate": lambda: "events",
            "nvmlEventSetFree": lambda events: None,
            "nvmlDeviceRegisterEvents": lambda gpu, kinds, events: None,
            "nvmlEventSetWait_v2": self._wait,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, answer)

    def _unsupported(self, gpu: str) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _errors(self, gpu: str, kind: int, counter: int) -> int:
        if kind == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED:
            return self.corrected
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _wait(self, events: str, timeout: int) -> SimpleNamespace:
        if not self.xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventData=self.xids.pop(0))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> _FakeNvml:
    fake = _FakeNvml()
    fake.install(monkeypatch)
    return fake


def test_the_state_of_a_gpu_and_its_new_errors_are_read(nvml: _FakeNvml) -> None:
    health = NvmlHealth()
    first = health.read("GPU-a")
    assert first == {
        "sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 3200.0,
        "temperature_c": 41.0,
        "throttle_reasons": 4.0,
        # those before the scan are not its own
        "ecc_corrected": 0.0,
        "xid_errors": 0.0,
    }
    nvml.corrected, nvml.xids = 7, [13, 31]
    second = health.read("GPU-a")
    assert (second["ecc_corrected"], second["xid_errors"], second["last_xid"]) == (2, 2, 31)
    # an error stays known
    assert health.read("GPU-a")["xid_errors"] == 2
    assert health.read("0")["ecc_corrected"] == 0
    health.close()


def test_a_gpu_that_reports_nothing_costs_nothing(
    nvml: _FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", refuse)
    assert NvmlHealth().read("GPU-a") == {}
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert isinstance(open_health(has_gpu=True), NoHealth)
    assert isinstance(open_health(has_gpu=False), NoHealth)


def test_poison_is_put_back() -> None:
    original = torch.empty
    with zeroed_allocations():
        assert torch.empty is not original
    assert torch.empty is original
    assert isinstance(torch.empty(1), Tensor)


@pytest.mark.parametrize(("trials", "seconds"), [(0, 0.0), (100_000, 3.0), (10_000_000, 60.0)])
def test_time_is_left_for_the_page_but_never_more_than_a_tenth(trials: int, seconds: float) -> None:
    history: Any = SimpleNamespace(count=lambda: trials)
    assert _for_page(history, 600.0) == pytest.approx(seconds)
