"""That the conditions of a trial hold while the subject runs, whatever is measured."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine, select_interpreter
from loragate.core.verdict import Failure, OracleName
from loragate.history import Outcome
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.case_run import CaseRun
from loragate.nightly.conditions import PLAIN, Cache, Clock, Conditions, Memory, Schedule
from loragate.nightly.wave import Measure
from loragate.protocol import BaseLayer, Capabilities
from loragate.scan import paths
from loragate.scan.child import measure, prepare_environment
from loragate.scan.investigate import signatures_of
from loragate.scan.messages import Measured, Order, Step
from loragate.scan.paths import TracedPath
from loragate.subjects.torch.subject import DenseDelta, TorchSubject

select_interpreter()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=3,
    in_features=8,
    slices=(8,),
    rank=2,
    slots=1,
    dtype=Dtype.FP32,
    oracles=(OracleName.REFERENCE,),
)
_NUMBERS = count()
TRUE_CLOCK = time.perf_counter


@triton.jit
def read_kernel(source, at):
    tl.load(source + at)


class Watching(TorchSubject):
    """Notes what surrounds each of its steps."""

    name = "watching"
    target: str
    fresh: list[Tensor]
    clocks: list[bool]
    # called in each step, and before one that is traced
    surroundings: Callable[[], object] = staticmethod(lambda: None)
    forgets: Callable[[], object] = staticmethod(lambda: None)

    def capabilities(self, machine: Machine) -> Capabilities | str:
        have = super().capabilities(machine)
        assert not isinstance(have, str)
        return replace(have, forgets=self.forgets)

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> DenseDelta:
        subject = self

        class Instance(DenseDelta):
            def apply(self, x: Tensor, out: Tensor) -> Tensor:
                subject.fresh.append(torch.empty(64))
                subject.surroundings()
                subject.clocks.append(time.perf_counter is TRUE_CLOCK)
                return super().apply(x, out)

        return Instance(case)


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> type[Watching]:
    # what a subject has said of itself is known by its name
    name = f"watching_subject_{next(_NUMBERS)}"
    module: Any = ModuleType(name)
    module.Watching, Watching.target = Watching, f"{name}:Watching"
    monkeypatch.setitem(sys.modules, name, module)
    Watching.fresh, Watching.clocks = [], []
    return Watching


def shown(what: Measure, conditions: Conditions) -> Measured:
    return measure(Step(run=CaseRun(Watching.target, CASE), measure=what), conditions, 0)


@pytest.mark.parametrize("what", Measure)
@pytest.mark.parametrize("memory", [Memory.ZEROS, Memory.POISON])
def test_fresh_memory_of_every_step_holds_what_the_conditions_say(
    what: Measure, memory: Memory, watching: type[Watching]
) -> None:
    assert shown(what, Conditions(memory=memory)).outcome is Outcome.RIGHT
    assert len(watching.fresh) >= (2 if what is Measure.BITS else 1)
    for fresh in watching.fresh:
        assert bool(fresh.isnan().all()) is (memory is Memory.POISON)
        assert bool((fresh == 0).all()) is (memory is Memory.ZEROS)


@pytest.mark.parametrize("what", Measure)
@pytest.mark.parametrize("clock", Clock)
def test_clocks_run_at_another_speed_in_every_step_where_the_conditions_say_so(
    what: Measure, clock: Clock, watching: type[Watching]
) -> None:
    assert shown(what, Conditions(clock=clock)).outcome is Outcome.RIGHT
    assert set(watching.clocks) == {clock is Clock.PLAIN}


class Drawing(Watching):
    """Rounds at random, by numbers that each step draws from the generator of a GPU."""

    name = "drawing"
    generator: torch.Generator

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> DenseDelta:
        subject = self

        class Instance(DenseDelta):
            def apply(self, x: Tensor, out: Tensor) -> Tensor:
                result = super().apply(x, out)
                drawn = torch.rand(result.shape, generator=subject.generator)
                return result.mul_(1 + 1e-6 * drawn)

        return Instance(case)


@pytest.mark.parametrize("conditions", [PLAIN, Conditions(memory=Memory.POISON, clock=Clock.FAST)])
def test_numbers_that_a_subject_draws_from_a_gpu_in_each_step_are_no_difference(
    conditions: Conditions, watching: type[Watching], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = watching.target.partition(":")
    monkeypatch.setattr(sys.modules[module], name, Drawing)
    # stands for the one of a GPU, which a step may draw from, and which torch seeds with its own
    generator = torch.Generator()
    monkeypatch.setattr(Drawing, "generator", generator, raising=False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", generator.manual_seed)
    digests: set[str] = set()
    for drawn_before in range(2):
        torch.rand(drawn_before, generator=generator)
        found = shown(Measure.BITS, conditions)
        assert found.outcome is Outcome.RIGHT, found.message
        digests.update(found.digests)
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("conditions", "changed"),
    [
        (PLAIN, {}),
        (Conditions(gpu="GPU-1"), {"CUDA_VISIBLE_DEVICES": "GPU-1"}),
        (Conditions(schedule=Schedule.BLOCKING), {"CUDA_LAUNCH_BLOCKING": "1"}),
        (Conditions(schedule=Schedule.DELAYED), {}),
        (
            Conditions(cache=Cache.COLD),
            {
                "TRITON_CACHE_DIR": "/folder/triton_cache_dir",
                "TORCHINDUCTOR_CACHE_DIR": "/folder/torchinductor_cache_dir",
            },
        ),
    ],
)
def test_a_process_has_the_variables_of_its_conditions_before_it_uses_a_device(
    conditions: Conditions, changed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", own)
    folder = Path("/folder")
    order = Order(steps=(), conditions=conditions, folder=folder, wave=folder, number=0, peers=1)
    prepare_environment(conditions, order)
    assert own == changed


def test_the_key_of_a_path_changes_with_any_of_its_kernels() -> None:
    keys = {TracedPath(kernels=kernels).key() for kernels in ({"a": "1"}, {"a": "2"}, {"b": "1"})}
    assert len(keys) == 3
    assert (
        TracedPath(kernels={"a": "1", "b": "2"}).key()
        == TracedPath(kernels={"b": "2", "a": "1"}).key()
    )


def traced(subject: str) -> Measured:
    step = Step(run=CaseRun(subject, CASE), measure=Measure.BITS, traced=True)
    found = measure(step, PLAIN, 0)
    assert found.outcome is Outcome.RIGHT, found.message
    return found


def test_a_step_has_the_same_source_whatever_its_process_remembers(
    watching: type[Watching], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from functools import cache\n\n@cache\ndef plan(rows):\n    return rows\n"
    (tmp_path / "remembered_plan.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = importlib.import_module("remembered_plan").plan
    monkeypatch.setattr(watching, "surroundings", staticmethod(lambda: plan(3)))
    kept: list[int] = [1]
    monkeypatch.setattr(watching, "forgets", staticmethod(kept.clear))
    first, second = (traced(watching.target) for _ in range(2))
    assert any(file.endswith("remembered_plan.py") for file in first.files)
    assert (second.files, second.path_key) == (first.files, first.path_key)
    assert kept == []


def test_what_an_import_of_a_step_runs_is_no_source_of_it(
    watching: type[Watching], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_late.py").write_text("def plan(): ...\nplan()\n", encoding="utf-8")
    (tmp_path / "called_late.py").write_text("def plan(): ...\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def surroundings() -> None:
        importlib.import_module("imported_late")
        importlib.import_module("called_late").plan()

    monkeypatch.setattr(watching, "surroundings", staticmethod(surroundings))
    for _ in range(2):
        names = {Path(file).name for file in traced(watching.target).files}
        assert "called_late.py" in names
        assert "imported_late.py" not in names


def test_what_is_collected_as_garbage_during_a_step_is_no_source_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "class Cyclic:\n    def __init__(self): self.own = self\n    def __del__(self): ...\n"
    (tmp_path / "left_behind.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    cyclic = importlib.import_module("left_behind").Cyclic
    cyclic()
    with paths.traced_path() as path:
        # many times what makes the collector run by itself
        kept = [[number] for number in range(100_000)]
    assert kept
    assert "left_behind.py" not in {Path(file).name for file in path.files}
    assert gc.isenabled()


def test_a_step_of_the_project_s_kernels_has_the_same_source_behind_an_equal_one() -> None:
    first, second = (traced("lorakernels") for _ in range(2))
    assert any(file.endswith("dense/plan.py") for file in first.files)
    assert (second.files, second.path_key) == (first.files, first.path_key)


def test_the_files_of_a_kernel_are_those_of_all_that_it_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "deepest": "def deepest(): ...",
        "middle": "from deepest import deepest\ndef middle(): deepest()",
        "kernel": "from middle import middle\ndef kernel(): middle()",
    }
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        module = importlib.import_module(name)
        # as functions of Triton are
        setattr(module, name, SimpleNamespace(fn=getattr(module, name)))
    function = sys.modules["kernel"].kernel.fn
    assert {Path(file).stem for file in paths._files_of_kernel(function)} == texts.keys()


def test_a_fault_that_a_subject_swallows_is_shown_by_the_failure_and_not_by_bits(
    watching: type[Watching], monkeypatch: pytest.MonkeyPatch
) -> None:
    def falls_back() -> None:
        with suppress(Exception):
            read_kernel[(1,)](torch.ones(8), 8)

    monkeypatch.setattr(watching, "surroundings", staticmethod(falls_back))
    found = shown(Measure.BITS, PLAIN)
    assert (found.outcome, found.failure) == (Outcome.WRONG, Failure.FOREIGN_MEMORY)
    # its bits are those of a trial that is right
    assert signatures_of(found) == (f"{Outcome.WRONG} {Failure.FOREIGN_MEMORY}",)


@pytest.mark.parametrize("outcome", Outcome)
def test_a_trial_that_shows_nothing_has_no_signature(outcome: Outcome) -> None:
    measured = Measured(
        index=0,
        outcome=outcome,
        failure="",
        message="",
        digests=(),
        duration_s=0.0,
        promised=True,
    )
    is_empty = outcome in (Outcome.INFRA, Outcome.UNKNOWN)
    assert (signatures_of(measured) == ()) is is_empty
