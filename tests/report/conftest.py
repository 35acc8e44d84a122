"""Events to report on: functions that build single ones, and a whole run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

from loragate.core.checkout import Tree
from loragate.core.resources import Resources
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.events.log import EventLog
from loragate.events.model import (
    CaseFinished,
    CaseStarted,
    CompileResult,
    Event,
    Expected,
    LegFinished,
    LegStarted,
    Note,
    RunFinished,
    RunStarted,
    Skipped,
)
from loragate.matrix.case import Case, Dtype, Execution, Layout, Mix, Parallel, Site, Tier
from loragate.matrix.ids import run_id, seed_of

RUN = "20261121-041530-712"


@pytest.fixture
def plan() -> Callable[..., RunStarted]:
    """Plan of one leg "kernels" that expects `run_ids` of subject "mine" at "dense_delta"."""

    def make(*run_ids: str, **changes: Any) -> RunStarted:
        row = Expected(
            leg="kernels", subject="mine", site="dense_delta", count=len(run_ids), run_ids=run_ids
        )
        known: dict[str, Any] = {
            "run": RUN,
            "started_at": "2026-11-21T04:15:30+00:00",
            "tier": Tier.PREMERGE,
            "subjects": ("mine",),
            "legs": ("kernels",),
            "expected": (row,),
        }
        return RunStarted(**known | changes)

    return make


@pytest.fixture
def finished() -> Callable[..., CaseFinished]:
    """End of one case; it passed with one passing judgement unless changed."""

    def make(case_run_id: str, verdict: Verdict = Verdict.PASS, **changes: Any) -> CaseFinished:
        known: dict[str, Any] = {
            "run_id": case_run_id,
            "subject": "mine",
            "site": "dense_delta",
            "draw": 0,
            "seed": 7,
            "worker": "gw0",
            "verdict": verdict,
            "judgements": (Judgement(OracleName.EXACT, Verdict.PASS),),
            "duration_s": 0.25,
            "replay": f"loragate replay {case_run_id} --draw 0",
        }
        return CaseFinished(**known | changes)

    return make


@pytest.fixture
def closing() -> tuple[Event, ...]:
    """What ends the run of `plan` well."""
    return (
        LegFinished(name="kernels", verdict=Verdict.PASS, exit_code=0, duration_s=3.0),
        RunFinished(finished_at="2026-11-21T04:15:40+00:00", duration_s=10.0),
    )


@pytest.fixture
def example_run() -> EventLog:
    """A premerge run with one of everything that can go wrong."""
    return EventLog(tuple(_example_events()))


_CHECKED = (
    OracleName.REFERENCE,
    OracleName.EXACT,
    OracleName.BASE_ROWS,
    OracleName.CANARY,
    OracleName.REPEAT,
    OracleName.PERMUTE,
    OracleName.SEQUENCE,
)
_ARCHS = ("sm_80", "sm_90", "sm_100")
_LEG_NAMES = ("host", "kernels", "compile")


def _dense() -> list[Case]:
    shapes = ((1, 4096, (4096,), 16), (37, 5120, (13824, 13824), 64), (256, 4096, (4096,) * 3, 24))
    axes = product(shapes, (Dtype.FP16, Dtype.BF16), tuple(Mix), (Layout.CONTIGUOUS,))
    cases = [_case(Site.DENSE_DELTA, *point) for point in axes]
    layouts = (Layout.COLUMN_SLICE, Layout.PADDED_ROWS, Layout.TRANSPOSED)
    cut = product(shapes[1:], (Dtype.BF16,), (Mix.RAGGED,), layouts)
    cases += [_case(Site.DENSE_DELTA, *point) for point in cut]
    graph = product(shapes, (Dtype.BF16,), tuple(Mix)[:4], (Layout.CONTIGUOUS,))
    return cases + [_case(Site.DENSE_DELTA, *point, execution=Execution.GRAPH) for point in graph]


def _linear() -> list[Case]:
    points = product((Parallel.COLUMN, Parallel.ROW), (1, 2, 8), (Mix.RAGGED, Mix.LAST_SLOT))
    shape = (64, 4096, (4096, 1024, 1024), 32)
    return [
        _case(Site.LORA_LINEAR, shape, Dtype.BF16, mix, Layout.CONTIGUOUS, parallel=cut, tp=tp)
        for cut, tp, mix in points
    ]


def _case(
    site: Site,
    shape: tuple[int, int, tuple[int, ...], int],
    dtype: Dtype,
    mix: Mix,
    layout: Layout,
    **more: Any,
) -> Case:
    tokens, width, slices, rank = shape
    return Case(
        site=site,
        tokens=tokens,
        in_features=width,
        slices=slices,
        rank=rank,
        slots=8,
        dtype=dtype,
        mix=mix,
        layout=layout,
        **more,
    )


def _example_events() -> Iterator[Event]:
    draw = random.Random(20261121)
    expected_cases = [("lorakernels", case) for case in (*_dense(), *_linear())]
    expected_cases += [("our_fork", case) for case in _dense()]
    graph = [
        owner
        for owner in expected_cases
        if owner[0] == "our_fork" and owner[1].execution == "graph"
    ]
    expected_cases = [owner for owner in expected_cases if owner not in graph]
    yield _example_plan(expected_cases, graph)
    yield from (LegStarted(name=name) for name in _LEG_NAMES)
    victims = iter(_example_troubles())
    forks = [case for subject, case in expected_cases if subject == "our_fork"]
    last, shuffled = Mix.LAST_SLOT, Mix.SHUFFLED
    wrong = {
        case
        for case in forks
        if (case.dtype, case.tokens, case.mix)
        in {(Dtype.FP16, 37, last), (Dtype.BF16, 37, shuffled), (Dtype.BF16, 256, shuffled)}
    }
    silent = expected_cases[-1]
    for number, (subject, case) in enumerate(expected_cases):
        if (subject, case) == silent:
            continue
        name, seed, worker = run_id(subject, case), seed_of(case, 0), f"gw{number % 4}"
        yield CaseStarted(run_id=name, worker=worker, draw=0, seed=seed)
        judgements: tuple[Judgement, ...] = tuple(_held(draw, oracle, case) for oracle in _CHECKED)
        verdict, failure, message = Verdict.PASS, None, ""
        if subject == "our_fork" and case in wrong:
            verdict, failure, message, bad = next(victims)
            spoiled = {judgement.oracle: judgement for judgement in bad}
            judgements = tuple(spoiled.get(j.oracle, j) for j in judgements) if bad else ()
        yield CaseFinished(
            run_id=name,
            subject=subject,
            site=case.site.value,
            draw=0,
            seed=seed,
            worker=worker,
            gpu=str(number % 2),
            verdict=verdict,
            judgements=judgements,
            duration_s=0.02 + draw.random() * 0.3,
            replay=f"loragate replay {name} --draw 0",
            failure=failure,
            message=message,
        )
    yield from _example_compiles()
    yield from _example_ends()


def _held(draw: random.Random, oracle: OracleName, case: Case) -> Judgement:
    if oracle is OracleName.PERMUTE and case.mix in (Mix.SINGLE, Mix.ALL_BASE):
        return Judgement(oracle, Verdict.SKIP, message="one slot has no permutation")
    if oracle is not OracleName.REFERENCE:
        return Judgement(oracle, Verdict.PASS)
    threshold = 2e-3 if case.dtype is Dtype.BF16 else 3e-4
    error = threshold * draw.betavariate(2, 3.5)
    return Judgement(oracle, Verdict.PASS, metrics={"err": error, "threshold": threshold})


def _example_troubles() -> Iterator[tuple[Verdict, Failure | None, str, tuple[Judgement, ...]]]:
    yield (
        Verdict.FAIL,
        Failure.WRONG_ANSWER,
        "",
        (
            Judgement(
                OracleName.REFERENCE,
                Verdict.FAIL,
                Failure.WRONG_ANSWER,
                "rows of slot 7 are zero: the delta of the last slot was never added",
                {"err": 0.0847, "threshold": 0.00112, "wrong_rows": 4},
                {"slot": 7, "token": 31, "slice": 1, "column": 9216},
            ),
            Judgement(
                OracleName.EXACT,
                Verdict.FAIL,
                Failure.WRONG_ANSWER,
                "exact data differs in 110592 of 1022976 elements",
                {"wrong_elements": 110592, "wrong_rows": 4},
                {"slot": 7, "token": 31, "slice": 0, "column": 0},
            ),
        ),
    )
    yield (
        Verdict.FAIL,
        Failure.STALE_STATE,
        "",
        (
            Judgement(
                OracleName.SEQUENCE,
                Verdict.FAIL,
                Failure.STALE_STATE,
                "step 1 after a larger step 0 differs from step 1 on a fresh instance",
                {"wrong_elements": 27648, "err": 0.0061, "threshold": 0.0},
                {"step": 1, "slot": -1, "token": 36},
            ),
        ),
    )
    yield (
        Verdict.INFRA,
        Failure.OUT_OF_MEMORY,
        "CUDA out of memory: 2.11 GiB asked, 1.48 GiB free on GPU 1",
        (),
    )


def _example_plan(
    expected_cases: list[tuple[str, Case]], graph: list[tuple[str, Case]]
) -> RunStarted:
    rows: dict[tuple[str, str], list[str]] = {}
    for subject, case in expected_cases:
        rows.setdefault((subject, case.site.value), []).append(run_id(subject, case))
    expected = [
        Expected(leg="kernels", subject=subject, site=site, count=len(names), run_ids=tuple(names))
        for (subject, site), names in rows.items()
    ]
    compiled = Expected(leg="compile", subject="lorakernels", site="compile", count=24)
    skipped = [
        Skipped(
            run_id=run_id(subject, case),
            subject=subject,
            site=case.site.value,
            reason="execution graph is not supported",
        )
        for subject, case in graph
    ]
    return RunStarted(
        run=RUN,
        started_at="2026-11-21T04:15:30+00:00",
        tier=Tier.PREMERGE,
        subjects=("lorakernels", "our_fork"),
        legs=_LEG_NAMES,
        expected=(*expected, compiled),
        skipped=tuple(skipped),
        commit="8586ae0d6e4f5b0c9a7f2f15a1c1f4e1d3c2b1a0",
        tree=Tree.DIRTY,
        versions={"python": "3.12.8", "torch": "2.13.0+cu130", "triton": "3.7.1"},
        machine={
            "device": "NVIDIA H200",
            "capability": "9.0",
            "system": "Linux 6.8",
            "cores": "16",
        },
    )


def _example_compiles() -> Iterator[CompileResult]:
    for kernel in ("_shrink_kernel", "_expand_kernel"):
        for dtype, rank in product(("bf16", "fp32"), (16, 128)):
            for arch in _ARCHS:
                now = Resources(64 + rank // 8, 0, 49152)
                grew = kernel == "_expand_kernel" and rank == 128 and dtype == "bf16"
                grown = Resources(now.registers + 24, 0, now.shared_bytes)
                yield CompileResult(
                    subject="lorakernels",
                    kernel=kernel,
                    specialisation=f"dtype-{dtype}.rank-{rank}.tokens-64",
                    arch=arch,
                    verdict=Verdict.PASS,
                    resources=grown if grew and arch == "sm_90" else now,
                    baseline=now,
                    message="24 registers more than recorded, occupancy is the same"
                    if grew and arch == "sm_90"
                    else "",
                )


def _example_ends() -> Iterator[Event]:
    yield LegFinished(name="host", verdict=Verdict.PASS, exit_code=0, duration_s=11.4)
    yield LegFinished(
        name="kernels",
        verdict=Verdict.FAIL,
        exit_code=1,
        duration_s=58.2,
        log_path="logs/kernels.log",
    )
    yield LegFinished(name="compile", verdict=Verdict.PASS, exit_code=0, duration_s=24.9)
    yield Note(text="our_fork reports its version as 0.26.1+local")
    yield RunFinished(finished_at="2026-11-21T04:16:45+00:00", duration_s=75.1)
