from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loragate.compile_leg import cubin, dry_launch, leg, process, record, run
from loragate.compile_leg.__main__ import main
from loragate.compile_leg.baseline import Baseline, Record, load_baseline, save_baseline
from loragate.compile_leg.dry_launch import Compiled, ProviderError, list_labels
from loragate.compile_leg.pool import Compilation
from loragate.core.resources import Resources
from loragate.core.verdict import ExitCode, Verdict
from loragate.events.model import CompileResult, Event, Note

pytestmark = pytest.mark.usefixtures("preloaded")

TOY = """
import os
import torch, triton
import triton.language as tl


@triton.jit
def scale_kernel(x_ptr, stride, BLOCK: tl.constexpr, SORT: tl.constexpr):
    offs = tl.arange(0, BLOCK) * stride
    x = tl.load(x_ptr + offs)
    y = tl.sort(x) if SORT else x
    tl.store(x_ptr + offs, y * 2)


@triton.jit
def broken_kernel(x_ptr, n):
    tl.store(x_ptr + tl.arange(0, n), 1)


def scale(block, sort):
    x = torch.empty(1 << 16, device="meta")
    scale_kernel[(1,)](x, 1, BLOCK=block, SORT=sort)


def launches(compute_capability):
    yield "plain", lambda: scale(256, False)
    yield "twice", lambda: (scale(256, False), scale(512, False))


def grown(compute_capability):
    yield "plain", lambda: scale(8192, False)
    yield "twice", lambda: (scale(256, False), scale(512, False))


def broken(compute_capability):
    yield "broken", lambda: broken_kernel[(1,)](torch.empty(8, device="meta"), 8)
    yield "host", lambda: torch.empty(-1)
    yield "plain", lambda: scale(256, False)


def deadly(compute_capability):
    yield "deadly", lambda: os._exit(9)
    yield "plain", lambda: scale(256, False)

"""


class _Collector:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        self.events.append(event)

    @property
    def results(self) -> dict[tuple[str, str], CompileResult]:
        found = [event for event in self.events if isinstance(event, CompileResult)]
        return {(result.kernel, result.specialisation): result for result in found}

    @property
    def compiled(self) -> set[str]:
        """Specialisations that were compiled in this run."""
        return {name for (_, name), result in self.results.items() if result.compiled}

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "toy_launches.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    return "toy_launches"


def test_resources_above_the_recorded_baseline_fail_and_name_the_kernel(
    toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the interpreter of this process must not keep the child processes from compiling
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    baseline, collector = tmp_path / "resources.json", _Collector()
    record(provider=f"{toy}:launches", archs=(90,), baseline=baseline)
    entries = next(iter(load_baseline(baseline).records.values())).entries
    assert set(entries) == {
        ("sm_90", "scale_kernel", "plain"),
        ("sm_90", "scale_kernel", "twice"),
        ("sm_90", "scale_kernel", "twice#2"),
    }

    verdict = run(collector, provider=f"{toy}:grown", archs=(90,), baseline=baseline)
    assert verdict is Verdict.FAIL
    verdicts = {name: result.verdict for (_, name), result in collector.results.items()}
    assert verdicts == {
        "plain": Verdict.FAIL,
        "twice": Verdict.PASS,
        "twice#2": Verdict.PASS,
    }
    assert "resources grew: registers" in collector.results["scale_kernel", "plain"].message
    assert collector.compiled == {"plain"}


def test_a_compile_error_fails_its_kernel_alone(toy: str, tmp_path: Path) -> None:
    baseline, collector = tmp_path / "resources.json", _Collector()
    save_baseline(Baseline(), baseline)
    run(collector, provider=f"{toy}:broken", archs=(90,), baseline=baseline)
    broken = collector.results["broken_kernel", "broken"]
    assert broken.verdict is Verdict.FAIL
    assert broken.message.startswith("does not compile: at ")
    assert "must be of type tl.constexpr" in broken.message
    assert "negative dimension" in collector.results["host", "host"].message
    # without a baseline even what compiles does not pass
    assert collector.results["scale_kernel", "plain"].verdict is Verdict.INCONCLUSIVE
    assert "has no baseline (recorded: none)" in collector.notes[0]


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (Compiled("toy_kernel", "small", "sm_90", None, "boom"), "does not compile: boom"),
        (
            Compiled("toy_kernel", "small", "sm_90", Resources(1, 0, 0), unwritten="reads UR6"),
            "was translated wrongly: reads UR6",
        ),
    ],
)
def test_what_does_not_compile_or_is_translated_wrongly_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Compiled, complaint: str
) -> None:
    monkeypatch.setattr(leg, "compiler_settings", lambda: ())
    monkeypatch.setattr(leg, "compile_all", lambda *_: Compilation("3.7.1", (), (broken,)))
    baseline = tmp_path / "resources.json"
    with pytest.raises(ValueError, match=rf"^toy_kernel for sm_90 \(small\) {complaint}"):
        record(baseline=baseline)
    assert not baseline.exists()


def test_a_kernel_that_kills_the_compiler_leaves_the_results_of_the_others(
    toy: str, tmp_path: Path
) -> None:
    baseline, collector = tmp_path / "resources.json", _Collector()
    save_baseline(Baseline(), baseline)
    run(collector, provider=f"{toy}:deadly", archs=(90,), baseline=baseline)
    deadly = collector.results["unknown", "deadly"]
    assert deadly.verdict is Verdict.FAIL
    assert "crashed its process" in deadly.message
    assert collector.results["scale_kernel", "plain"].resources is not None


@pytest.mark.parametrize(
    ("provider", "complaint"),
    [
        ("no_such_module:launches", "No module named 'no_such_module'"),
        ("json:nothing", "has no attribute 'nothing'"),
        ("toy_labels:repeated", r"labels must be unique \(given twice: plain\)"),
    ],
)
def test_a_provider_that_breaks_its_promise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, complaint: str
) -> None:
    (tmp_path / "toy_labels.py").write_text("repeated = lambda _: [('plain', print)] * 2")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ProviderError, match=f"^{provider}: .*{complaint}"):
        list_labels(provider)


@pytest.mark.parametrize("options", [[], ["--all"]])
def test_another_release_is_installed_apart_and_recorded_by_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    commands: list[tuple[list[str], str]] = []

    def run_command(
        command: Sequence[str], *, env: dict[str, str], **_: object
    ) -> subprocess.CompletedProcess[bytes]:
        commands.append((list(command[1:]), env["PYTHONPATH"]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("PYTHONPATH", "sources")
    monkeypatch.setattr(subprocess, "run", run_command)
    baseline = str(tmp_path / "resources.json")
    assert main(["--update", "--release", "3.8.0", "--baseline", baseline, *options]) == 0
    (install, _), (update, path) = commands
    assert install[-1] == "triton==3.8.0"
    leg_of_it = ["-m", "loragate.compile_leg", "--update", "--baseline", baseline]
    assert update == [*leg_of_it, *options]
    assert path == os.pathsep.join([install[-2], "sources"])


def test_a_release_that_cannot_be_installed_is_an_infrastructure_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_command(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run_command)
    assert main(["--update", "--release", "9.9.9"]) == 3
    assert "Triton 9.9.9 is not recorded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--relaese=3.6.0"], "unrecognized arguments: --relaese=3.6.0"),
        (["--release=3.6.0"], "--release needs --update"),
        (["--baseline="], "argument --baseline: must be a path (got '')"),
    ],
)
def test_a_wrong_word_is_a_usage_error_and_does_not_mean_that_something_was_not_judged(
    arguments: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == ExitCode.USAGE
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict.PASS, ExitCode.OK),
        (Verdict.FAIL, ExitCode.WRONG),
        (Verdict.INFRA, ExitCode.INFRASTRUCTURE),
        (Verdict.INCONCLUSIVE, ExitCode.INCOMPLETE),
    ],
)
def test_only_a_leg_that_passes_ends_with_exit_code_0(
    verdict: Verdict, code: ExitCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loragate.compile_leg.__main__.run", lambda *_, **__: verdict)
    assert main([]) == code


@pytest.mark.parametrize("verdicts", [*permutations([Verdict.PASS, Verdict.FAIL])])
def test_the_leg_of_several_subjects_ends_with_the_worst_of_them(
    verdicts: tuple[Verdict, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = iter(verdicts)
    monkeypatch.setattr("loragate.compile_leg.run", lambda *_, **__: next(waiting))
    events = str(tmp_path / "events.jsonl")
    assert process.main(events, "run", "smoke", "one", "other") == ExitCode.WRONG


def test_an_unreadable_baseline_is_an_infrastructure_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "resources.json"
    path.write_text(json.dumps({"schema": 99, "records": {}}))
    assert main(["--baseline", str(path)]) == 3
    assert "schema must be 2 (got 99)" in capsys.readouterr().out


def test_a_baseline_that_cannot_be_written_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leg, "compile_all", lambda *_: pytest.fail("something was compiled"))
    (tmp_path / "file").touch()
    baseline = tmp_path / "file" / "resources.json"
    assert main(["--update", "--baseline", str(baseline)]) == 3
    assert f"{baseline}: cannot be written: " in capsys.readouterr().err


def test_releases_that_are_recorded_side_by_side_are_all_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = tmp_path / "resources.json"
    other = Record("8.1.0", {("sm_90", "kernel", "label"): Resources(1, 0, 0)})

    def compile_while_another_records(*_: object) -> Compilation:
        save_baseline(Baseline().with_record(other), baseline)
        return Compilation("9.1.0", (), ())

    monkeypatch.setattr(leg, "compile_all", compile_while_another_records)
    record(baseline=baseline)
    assert sorted(load_baseline(baseline).records) == ["8.1", "9.1"]


def test_a_leg_that_cannot_record_its_results_says_nothing_about_the_kernels(
    tmp_path: Path,
) -> None:
    # a folder in the place of the events
    command = [sys.executable, "-m", "loragate.compile_leg.process", str(tmp_path), "run", "smoke"]
    done = subprocess.run([*command, "lorakernels"], capture_output=True, text=True)
    assert done.returncode == 3
    assert "IsADirectoryError" in done.stderr


def test_a_kernel_that_needs_more_tensor_memory_than_a_block_has_does_not_compile() -> None:
    recorder: Any = dry_launch._Recorder("label", "sm_100", {})
    metadata = SimpleNamespace(tmem_size=513)
    recorder._run = lambda *_, **__: SimpleNamespace(metadata=metadata)
    kernel = SimpleNamespace(fn=SimpleNamespace(__name__="kernel"), device_caches={})
    recorder.compile(kernel, (), {})
    (found,) = recorder.found
    assert found.resources is None
    assert "needs 513 columns of tensor memory, a block has at most 512" in found.error


def test_nothing_that_a_process_has_compiled_before_keeps_a_kernel_from_the_compiler() -> None:
    recorder: Any = dry_launch._Recorder("label", "sm_90", {})
    kernel = SimpleNamespace(fn=SimpleNamespace(__name__="kernel"), device_caches={90: "compiled"})
    caches: list[dict[int, str]] = []
    recorder._run = lambda kernel, **_: caches.append(dict(kernel.device_caches))
    recorder.compile(kernel, (), {})
    assert caches == [{}]


def test_bytes_of_stack_and_of_local_memory_are_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    said = " Function kernel:\n  REG:40 STACK:16 SHARED:1040 LOCAL:8 CONSTANT[0]:560"
    done = SimpleNamespace(stdout=said, stderr="", returncode=0)
    monkeypatch.setattr(cubin, "run_tool", lambda *_: done)
    assert cubin.read_resources(b"", 2048) == Resources(40, 24, 2048)
    done.returncode = 1
    with pytest.raises(RuntimeError, match="cuobjdump found"):
        cubin.read_resources(b"", 2048)


def test_a_content_that_triton_cannot_tell_equals_no_other_one() -> None:
    recorder: Any = dry_launch._Recorder("label", "sm_90", {})
    recorder._order, recorder._launch = SimpleNamespace(add=lambda *_: None), ()
    recorder.content, recorder._expected = "known", "known"
    with pytest.raises(dry_launch._Unchanged):
        recorder.look_at("module {}")
    recorder.content, recorder._expected = "", ""
    # it goes on into the compiler
    recorder.look_at("module {}")
