"""Kernels of one dry launch that overlap, and do not wait where they must."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from loragate.compile_leg import dependents, record, run
from loragate.core.verdict import Verdict
from loragate.events.model import CompileResult, Event

pytestmark = pytest.mark.usefixtures("preloaded")

TOY = """
import torch, triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def shrink(x_ptr, shrunk_ptr, WAITS: tl.constexpr, FIRST: tl.constexpr):
    offs = tl.arange(0, 64)
    if FIRST:
        gdc_launch_dependents()
    if WAITS:
        gdc_wait()
    gdc_launch_dependents()
    tl.store(shrunk_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def expand(b_ptr, shrunk_ptr, out_ptr, EARLY: tl.constexpr, LEAVES: tl.constexpr):
    offs = tl.arange(0, 64)
    b = tl.load(b_ptr + offs)
    if LEAVES:
        if tl.program_id(0) > 7:
            return
    if EARLY:
        h = tl.load(shrunk_ptr + offs)
        gdc_wait()
    else:
        gdc_wait()
        h = tl.load(shrunk_ptr + offs)
    tl.store(out_ptr + offs, tl.load(out_ptr + offs) + b * h)


def delta(waits=True, first=False, early=False, leaves=False, pdl=True):
    x, shrunk, b, out = (torch.empty(64, device="meta") for _ in range(4))
    shrink[(1,)](x, shrunk, WAITS=waits, FIRST=first, launch_pdl=pdl)
    expand[(8,)](b, shrunk, out, EARLY=early, LEAVES=leaves, launch_pdl=pdl)


def right(compute_capability):
    yield "delta", delta


def without_dependents(compute_capability):
    yield "delta", lambda: delta(waits=False, early=True, leaves=True, pdl=False)


def wrong(compute_capability):
    yield "unwaited", lambda: delta(waits=False)
    yield "signals-first", lambda: delta(first=True)
    yield "early", lambda: delta(early=True)
    yield "leaves", lambda: delta(leaves=True)
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "toy_dependents.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    return "toy_dependents"


def _judged(provider: str, baseline: Path) -> dict[str, CompileResult]:
    """Of the last kernel of each launch."""
    events: list[Event] = []

    class Writer:
        def write(self, event: Event) -> None:
            events.append(event)

    run(Writer(), provider=provider, archs=(90,), baseline=baseline)
    results = [event for event in events if isinstance(event, CompileResult) and event.resources]
    assert {each.verdict for each in results if each.kernel == "shrink"} == {Verdict.PASS}
    return {each.specialisation: each for each in results if each.kernel == "expand"}


@pytest.mark.parametrize("launches", ["right", "without_dependents"])
def test_kernels_that_wait_for_each_other_or_do_not_overlap_pass(
    toy: str, tmp_path: Path, launches: str
) -> None:
    baseline = tmp_path / "resources.json"
    record(provider=f"{toy}:{launches}", archs=(90,), baseline=baseline)
    (result,) = _judged(f"{toy}:{launches}", baseline).values()
    assert (result.verdict, result.compiled) == (Verdict.PASS, False)


def test_kernels_that_do_not_wait_fail_also_where_they_are_those_on_record(
    toy: str, tmp_path: Path
) -> None:
    baseline = tmp_path / "resources.json"
    record(provider=f"{toy}:wrong", archs=(90,), baseline=baseline)
    judged = _judged(f"{toy}:wrong", baseline)
    assert not any(result.compiled for result in judged.values())
    assert {result.verdict for result in judged.values()} == {Verdict.FAIL}
    messages = {name: result.message for name, result in judged.items()}
    ahead = "node 0 (the work ahead) writes and node 1 (shrink) reads bytes 0 to 256 of x_ptr"
    assert ahead in messages["unwaited"]
    # the expand reads its weights while the work ahead of the shrink may still run
    weights = "node 0 (the work ahead) writes and node 2 (expand) reads bytes 0 to 256 of b_ptr"
    assert weights in messages["signals-first"]
    early = "node 1 (shrink) writes and node 2 (expand) reads bytes 0 to 256 of shrunk_ptr"
    assert early in messages["early"]
    left = "node 1 (shrink) writes and node 3 (the work behind) writes bytes 0 to 256 of shrunk_ptr"
    assert left in messages["leaves"]


def test_what_a_kernel_reads_and_writes_ahead_of_its_wait_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use = SimpleNamespace(reads={0, 1}, writes={1, 2}, early_reads={0}, early_writes={2})
    monkeypatch.setattr(dependents, "pointer_use", lambda ttir: use)
    monkeypatch.setattr(dependents, "waits_of", lambda ttir: None)
    tensors = [(name, torch.empty(4)) for name in ("read", "both", "written")]
    node = dependents._Launch("kernel", tensors, True, "").node()
    found = [(access.name, access.is_write, access.is_early) for access in node.accesses]
    assert found == [
        ("read", False, True),
        ("both", False, False),
        ("both", True, False),
        ("written", True, True),
    ]
