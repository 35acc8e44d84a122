"""What is compiled again, and what is taken from the record."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from loragate.compile_leg import BASELINE, pool, process, record, run
from loragate.compile_leg.baseline import Baseline, Record, load_baseline, save_baseline
from loragate.compile_leg.content import content_of, settings_of_the_compiler
from loragate.compile_leg.leg import SettingsError
from loragate.core.verdict import ExitCode, Verdict
from loragate.events.model import CompileResult, Event, Note

pytestmark = pytest.mark.usefixtures("preloaded")

_ROOT = BASELINE.parents[2]

PARTS = """
import triton
import triton.language as tl

SIZE = tl.constexpr(64)
STEP = tl.constexpr(3)


@triton.jit
def helper(x):
    return x + 1


@triton.jit
def stepper(x, step: tl.constexpr = STEP):
    return x * step
"""

KERNELS = """
import torch, triton
import triton.language as tl
import parts
from parts import helper, stepper

FACTOR = tl.constexpr(2)


@triton.jit
def source(ptr):
    # enough registers for a growth beyond the margin
    offsets = tl.arange(0, 8192) * 3
    tl.store(ptr + offsets, tl.load(ptr + offsets) * 5 + 1)


@triton.jit
def calls(ptr):
    tl.store(ptr + tl.arange(0, 64), helper(tl.arange(0, 64)))


@triton.jit
def default(ptr):
    tl.store(ptr + tl.arange(0, 64), stepper(tl.arange(0, 64)))


@triton.jit
def constant(ptr):
    tl.store(ptr + tl.arange(0, 64), FACTOR)


@triton.jit
def elsewhere(ptr):
    tl.store(ptr + tl.arange(0, 64) * parts.SIZE, 1)


@triton.jit
def warps(ptr):
    tl.store(ptr + tl.arange(0, 64), 2)


@triton.jit
def strided(ptr, stride):
    tl.store(ptr + tl.arange(0, 64) * stride, 2)


@triton.jit
def untouched(ptr):
    tl.store(ptr + tl.arange(0, 64), tl.arange(0, 64) * 7)


def launches(compute_capability):
    x = torch.empty(1 << 16, device="meta")
    for kernel in (source, calls, default, constant, elsewhere, untouched):
        yield kernel.fn.__name__, lambda kernel=kernel: kernel[(1,)](x)
    yield "warps", lambda: warps[(1,)](x, num_warps=4)
    yield "strided", lambda: strided[(1,)](x, 16)
"""

# what each kernel depends on, and how it is changed
EDITS = {
    "source": ("* 5 + 1", "* 5 + 3"),
    "calls": ("x + 1", "x + 2"),
    "default": ("STEP = tl.constexpr(3)", "STEP = tl.constexpr(4)"),
    "constant": ("FACTOR = tl.constexpr(2)", "FACTOR = tl.constexpr(3)"),
    "elsewhere": ("SIZE = tl.constexpr(64)", "SIZE = tl.constexpr(32)"),
    "warps": ("num_warps=4", "num_warps=8"),
    "strided": ("(x, 16)", "(x, 17)"),
}


class _Collector:
    def __init__(self) -> None:
        self.results: dict[str, CompileResult] = {}
        self.notes: list[str] = []

    def write(self, event: Event) -> None:
        if isinstance(event, CompileResult):
            self.results[event.specialisation] = event
        elif isinstance(event, Note):
            self.notes.append(event.text)

    @property
    def compiled(self) -> set[str]:
        return {name for name, result in self.results.items() if result.compiled}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the kernels, and with a baseline of them."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "parts.py").write_text(PARTS)
    (folder / "toy_kernels.py").write_text(KERNELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        record(provider="toy_kernels:launches", archs=(90,), baseline=folder / "resources.json")
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, elsewhere on the disk."""
    copy = shutil.copytree(recorded, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache*"))
    monkeypatch.syspath_prepend(copy)
    return copy


def _run(folder: Path, *, everything: bool = False) -> tuple[Verdict, _Collector]:
    collector = _Collector()
    verdict = run(
        collector,
        provider="toy_kernels:launches",
        archs=(90,),
        baseline=folder / "resources.json",
        everything=everything,
    )
    return verdict, collector


def _edit(folder: Path, *names: str) -> None:
    for path in (folder / "parts.py", folder / "toy_kernels.py"):
        text = path.read_text()
        for name in names:
            text = text.replace(*EDITS[name], 1)
        # a kernel that stands elsewhere in its file is the same kernel
        path.write_text("\n\n# moved\n" + text)


def _rewrite(folder: Path, change: dict[str, dict[str, object]]) -> None:
    """Change the only record of the baseline."""
    path = folder / "resources.json"
    (old,) = load_baseline(path).records.values()
    entries, contents = dict(old.entries), dict(old.contents)
    for name, fields in change.items():
        key = ("sm_90", name, name)
        contents[key] = str(fields.pop("content", contents[key]))
        entries[key] = replace(entries[key], **fields)  # type: ignore[arg-type]
    save_baseline(Baseline().with_record(Record(old.triton, entries, contents)), path)


def test_exactly_the_kernels_with_another_content_are_compiled_again(folder: Path) -> None:
    _edit(folder, *EDITS)
    _, collector = _run(folder)
    assert collector.compiled == set(EDITS)
    assert collector.results.keys() - collector.compiled == {"untouched"}
    assert collector.notes == [
        "compile leg: 7 kernels compiled, 1 not compiled because they are unchanged since the "
        "baseline"
    ]


def test_what_is_unchanged_has_the_recorded_resources_and_is_not_compiled(folder: Path) -> None:
    verdict, collector = _run(folder)
    assert verdict is Verdict.PASS
    assert collector.compiled == set()
    assert all(result.resources for result in collector.results.values())
    assert all(r.resources == r.baseline for r in collector.results.values())


def test_a_content_that_is_not_the_one_of_the_kernel_has_it_compiled_and_judged(
    folder: Path,
) -> None:
    (old,) = load_baseline(folder / "resources.json").records.values()
    other = old.contents["sm_90", "calls", "calls"]
    _rewrite(folder, {"source": {"content": other, "registers": 1}, "warps": {"content": ""}})
    verdict, collector = _run(folder)
    assert collector.compiled == {"source", "warps"}
    assert verdict is Verdict.FAIL
    assert "resources grew: registers 1 -> " in collector.results["source"].message


def test_a_wrong_record_of_the_present_content_is_found_by_compiling_everything(
    folder: Path,
) -> None:
    _rewrite(folder, {"source": {"registers": 1}})
    verdict, collector = _run(folder)
    assert (verdict, collector.compiled) == (Verdict.PASS, set())
    verdict, collector = _run(folder, everything=True)
    assert collector.compiled == collector.results.keys()
    assert verdict is Verdict.FAIL
    assert [name for name, r in collector.results.items() if r.verdict is not Verdict.PASS] == [
        "source"
    ]


def _record(folder: Path, *, everything: bool = False) -> set[str]:
    """The kernels that were compiled to record all of them."""
    results = record(
        provider="toy_kernels:launches",
        archs=(90,),
        baseline=folder / "resources.json",
        everything=everything,
    )
    return {result.specialisation for result in results if result.compiled}


def test_what_is_unchanged_is_recorded_again_without_being_compiled(folder: Path) -> None:
    path = folder / "resources.json"
    # what only a record can say of an unchanged kernel
    _rewrite(folder, {"untouched": {"registers": 1}})
    before = path.read_bytes()
    assert _record(folder) == set()
    assert path.read_bytes() == before
    _edit(folder, "source")
    assert _record(folder) == {"source"}
    (now,) = load_baseline(path).records.values()
    assert now.entries["sm_90", "untouched", "untouched"].registers == 1
    assert _run(folder)[1].compiled == set()
    assert "untouched" in _record(folder, everything=True)
    (now,) = load_baseline(path).records.values()
    assert now.entries["sm_90", "untouched", "untouched"].registers > 1


def test_a_recorded_kernel_that_no_longer_fits_the_gpu_fails_uncompiled(folder: Path) -> None:
    _rewrite(folder, {"source": {"shared_bytes": 1 << 20}})
    verdict, collector = _run(folder)
    assert verdict is Verdict.FAIL
    assert "of shared memory, sm_90 allows a block at most" in collector.results["source"].message


def test_a_setting_of_the_compiler_has_everything_compiled_and_nothing_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # nothing in the kernel or its options shows this one
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    _, collector = _run(folder)
    assert collector.compiled == collector.results.keys()
    assert collector.notes[0].endswith("the record is not used because of DISABLE_PTXAS_OPT")
    before = (folder / "resources.json").read_bytes()
    with pytest.raises(SettingsError, match=r"unset DISABLE_PTXAS_OPT$"):
        record(provider="toy_kernels:launches", archs=(90,), baseline=folder / "resources.json")
    assert (folder / "resources.json").read_bytes() == before


@pytest.mark.parametrize(
    ("variable", "counts"),
    [
        ("TRITON_PTXAS_PATH", True),
        ("TRITON_KERNEL_OVERRIDE", True),
        ("TRITON_OF_A_LATER_RELEASE", True),
        ("LLVM_PASS_PLUGIN_PATH", True),
        ("TRITON_CACHE_DIR", False),
        ("TRITON_INTERPRET", False),
        ("HOME", False),
    ],
)
def test_variables_that_may_reach_the_compiler_count_as_its_settings(
    variable: str, counts: bool
) -> None:
    found = settings_of_the_compiler({variable: "1"})
    assert (variable in found) is counts


def test_a_content_changes_with_all_that_the_compiler_is_given(tmp_path: Path) -> None:
    library = tmp_path / "libdevice.bc"
    library.write_bytes(b"one")

    def content(text: str = "module", target: str = "sm_90", **options: object) -> str:
        chosen = SimpleNamespace(
            **{"num_warps": 4, "extern_libs": (("lib", str(library)),)} | options
        )
        return content_of(SimpleNamespace(str_nodebug=lambda: text), chosen, target)

    other = tmp_path / "other.bc"
    other.write_bytes(b"two")
    found = [
        content(),
        content("another module"),
        content(target="sm_100"),
        content(num_warps=8),
        content(extern_libs=(("lib", str(other)),)),
    ]
    assert len(set(found)) == len(found)
    # wherever the same library lies
    copy = shutil.copy(library, tmp_path / "copy.bc")
    assert content(extern_libs=(("lib", str(copy)),)) == content()


@pytest.mark.parametrize(("tier", "everything"), [("premerge", False), ("nightly", True)])
def test_the_nightly_tier_trusts_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, everything: bool
) -> None:
    asked: list[bool] = []

    def remember(writer: object, *, subject: str, everything: bool) -> Verdict:
        asked.append(everything)
        return Verdict.PASS

    monkeypatch.setattr("loragate.compile_leg.run", remember)
    assert process.main(str(tmp_path / "events.jsonl"), "run", tier, "lorakernels") == 0
    assert asked == [everything]


@pytest.mark.parametrize(
    ("cores", "free_gib", "workers"), [(16, 100, 16), (16, 3, 4), (1, 100, 1), (16, 0, 1)]
)
def test_there_is_a_worker_for_each_core_that_memory_allows(
    monkeypatch: pytest.MonkeyPatch, cores: int, free_gib: int, workers: int
) -> None:
    monkeypatch.setattr(pool, "usable_cores", lambda: cores)
    monkeypatch.setattr(pool, "free_host_bytes", lambda: free_gib << 30)
    assert pool._worker_count() == workers


@pytest.mark.drill(
    tried="A kernel launched with fewer warps, so that each needs more registers",
    exit_code=ExitCode.WRONG,
    kept="results of all kernels; those with another content are compiled, the rest is on record",
)
def test_a_planted_edit_of_a_kernel_is_compiled_and_fails(drill, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    copy = shutil.copytree(_ROOT / "kernels", tmp_path / "kernels")
    source = copy / "lorakernels" / "moe" / "align" / "counted.py"
    text = source.read_text()
    assert text.count("num_warps=8,\n") == 1
    source.write_text(text.replace("num_warps=8,\n", "num_warps=1,\n"))
    done = _compile_leg(copy, "--arch", "90")
    drill(done.returncode, done.stdout + done.stderr)
    record_here = load_baseline(BASELINE).find(version("triton"))
    assert record_here is not None
    unchanged = sum(arch == "sm_90" for arch, _, _ in record_here.entries) - 2
    assert f"compile leg: 2 kernels compiled, {unchanged} not compiled" in done.stdout
    growth = [line for line in done.stdout.splitlines() if line.startswith("fail: ")]
    assert growth
    assert all(line.startswith("fail: find_offsets_kernel for sm_90 (") for line in growth)


@pytest.mark.drill(
    tried="A baseline recorded while the environment changes the compiler",
    exit_code=ExitCode.USAGE,
    kept="the baseline; the variable to unset is named",
)
def test_a_baseline_of_a_changed_compiler_is_not_recorded(drill, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    baseline = tmp_path / "resources.json"
    done = _compile_leg(
        _ROOT / "kernels", "--update", "--baseline", str(baseline), DISABLE_PTXAS_OPT="1"
    )
    drill(done.returncode, done.stdout + done.stderr)
    assert "unset DISABLE_PTXAS_OPT" in done.stderr
    assert not baseline.exists()


def _compile_leg(
    kernels: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(kernels), str(_ROOT / "harness")])
    return subprocess.run(
        [sys.executable, "-m", "loragate.compile_leg", *arguments],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
