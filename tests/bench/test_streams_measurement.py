from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from loragate.bench import (
    moe_rows,
    streams_gdn,
    streams_linear,
    streams_moe,
    streams_rows,
    vllm_streams,
)
from loragate.bench.contender import Contender, Unavailable, WrongResult, find_contender
from loragate.bench.lorakernels_moe_streams import MoELayer
from loragate.bench.lorakernels_streams import InputProjection, LinearLayer
from loragate.bench.moe_rows import Projection
from loragate.bench.rows import Linear
from loragate.bench.streams import measure, run_streams
from loragate.bench.streams_measured import GDNFigures, LinearFigures, MoEFigures
from loragate.bench.streams_rows import Adapted, GDNRow, GDNShape, LinearRow, MoERow, StreamRow
from loragate.bench.vllm_streams import DualStream, load_fork
from loragate.core.machine import Machine, detect_machine, select_interpreter
from loragate.inputs.pairs import out_rows
from loragate.matrix.case import Case, Site, Source
from loragate.oracles.numeric.deltas import deltas
from loragate.protocol import Batch, Pool, Routes

select_interpreter()

from lorakernels.moe.layer.forms import MoEForm  # noqa: E402
from lorakernels.runtime import streams  # noqa: E402
from lorakernels.runtime.options import DUAL_STREAM  # noqa: E402
from lorakernels.runtime.tuning import DEFAULT  # noqa: E402

MACHINE = detect_machine()
ROW = LinearRow("tiny", Linear(32, (24, 16)), 1, 8)
LARGER = replace(ROW, tokens=6)
SMALL = MappingProxyType(
    {
        "together": GDNShape(32, 2, 4, 8, grouped=True),
        "apart": GDNShape(32, 2, 4, 8, grouped=False),
    }
)
SMALL_EXPERTS = MappingProxyType(
    {
        "qwen3_30b_w13": Projection(32, (24, 24), 3, 2),
        "qwen3_30b_w2": Projection(24, (32,), 3, 2, Source.PAIR),
    }
)
_Key = TypeVar("_Key", bound=Hashable)


class PlainInstance:
    """vLLM's two ways to get a delta, by plain torch; `factor` makes a stored one wrong."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def load(self, slot: int, pool: Pool) -> None:
        self.pool = pool

    def prepare(self, token_slots: Tensor) -> None:
        self.token_slots = token_slots

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return out.add_(self._delta(x, out))

    def store(self, x: Tensor, out: Tensor) -> Tensor:
        assert not out.any()
        return out.copy_(self._delta(x, out) * self.factor)

    def _delta(self, x: Tensor, out: Tensor) -> Tensor:
        rows = out_rows(Batch(x, self.token_slots, out))
        return deltas(self.pool, x, rows, torch.float32).to(out.dtype)


class PlainSubject:
    name = "vllm"

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def open(self, case: Case, machine: Machine, base: None) -> PlainInstance:
        return PlainInstance(self.factor)


def in_order(
    first: Callable[[], Tensor], second: Callable[[], Tensor], *resources: object
) -> tuple[Tensor, Tensor]:
    """A fork and join for a device without streams."""
    assert len(resources) == 3
    return first(), second()


@pytest.fixture(autouse=True)
def modelled_streams(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Streams that run everything at once, and an importable fork of vLLM."""
    module = Mock(stream=lambda stream: nullcontext(), device=lambda device: nullcontext())
    module.Stream.side_effect = lambda **options: Mock()
    module.is_current_stream_capturing.return_value = False
    monkeypatch.setattr(streams, "stream_module", lambda device: module)
    monkeypatch.setattr("torch.cuda.Event", Mock)
    monkeypatch.setattr("torch.cuda.Stream", Mock)
    monkeypatch.setattr(streams_linear, "load_fork", lambda machine: in_order)
    for module_of_rows in (streams_rows, streams_gdn):
        monkeypatch.setattr(module_of_rows, "GDN_SHAPES", SMALL)
    monkeypatch.setattr(streams_gdn, "GDN_TOKENS", (6,))
    monkeypatch.setattr(streams_moe, "MOE_TOKENS", (6,))
    monkeypatch.setattr(moe_rows, "PROJECTIONS", SMALL_EXPERTS)
    monkeypatch.delenv(DUAL_STREAM, raising=False)
    # the plan takes two streams for one row of the small layers of these tests
    small = replace(DEFAULT, dense=replace(DEFAULT.dense, dual_more_rows=1, dual_weights=1))
    monkeypatch.setattr("lorakernels.dense.ops.tuning_of", lambda device: small)
    return module


@pytest.fixture(scope="module")
def ours() -> Contender:
    return find_contender("lorakernels")


def vllm(ours: Contender, factor: float = 1.0) -> Contender:
    subject: Any = PlainSubject(factor)
    return Contender(subject, ours.have)


def counted(calls: Mapping[_Key, Callable[[], object]]) -> dict[_Key, float]:
    """Time is the number of calls so far: nothing here depends on a clock or a device."""
    for call in calls.values():
        call()
    return {name: 10.0 * (index + 1) for index, name in enumerate(calls)}


def run(ours: Contender, row: StreamRow, baseline: Contender | None = None) -> Any:
    (found,) = measure(ours, baseline, [row], MACHINE, counted, print)
    return found


def test_base_every_form_the_plan_and_both_ways_of_vllm_are_timed_in_turns(
    ours: Contender,
) -> None:
    found = run(ours, ROW, vllm(ours))
    assert isinstance(found, LinearFigures)
    assert found.base_us == 10.0
    assert found.forms.us == {"single": 20.0, "ahead": 30.0, "dual": 40.0, "stored": 50.0}
    assert (found.forms.chosen, found.forms.planned_us) == ("stored", 60.0)
    assert found.baseline is not None
    assert (found.baseline.sequential_us, found.baseline.dual_us) == (70.0, 80.0)
    assert len(found.errors) == 7
    assert all(0.3 < error < 1.5 for error in found.errors.values())


def test_the_plan_chooses_with_the_switch_on_and_the_switch_is_put_back(
    ours: Contender, modelled_streams: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DUAL_STREAM, "0")
    assert run(ours, ROW).forms.chosen == "stored"
    # a fork records two events: the forms of two streams and the plan, checked and timed
    assert modelled_streams.Event.call_count == 3 * 2 * 2
    assert os.environ[DUAL_STREAM] == "0"
    modelled_streams.Event.reset_mock()
    assert run(ours, LARGER).forms.chosen == "single"
    assert modelled_streams.Event.call_count == 2 * 2 * 2
    monkeypatch.delenv(DUAL_STREAM)
    run(ours, ROW)
    assert DUAL_STREAM not in os.environ


def test_a_vllm_without_its_fork_is_timed_on_one_stream_and_the_reason_is_given_once(
    ours: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_linear, "load_fork", lambda machine: "it has none")
    lines: list[str] = []
    found = list(measure(ours, vllm(ours), [ROW, LARGER], MACHINE, counted, lines.append))
    assert lines == ["no baseline with two streams: vllm: it has none"]
    for figures in found:
        assert isinstance(figures, LinearFigures)
        assert figures.baseline is not None
        assert (figures.baseline.sequential_us, figures.baseline.dual_us) == (70.0, None)
        assert figures.ratio is None


@pytest.mark.parametrize("row", [ROW, LARGER], ids=lambda row: row.id)
@pytest.mark.parametrize("form", ["single", "ahead", "dual", "stored", None])
def test_a_form_of_a_linear_layer_with_a_wrong_result_is_never_timed(
    ours: Contender, row: LinearRow, form: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LinearLayer._forward

    def wrong(self: LinearLayer, x: Tensor, wanted: str | None) -> tuple[Tensor, ...]:
        (out,) = right(self, x, wanted)
        return (out * 0.9 if wanted == form else out,)

    monkeypatch.setattr(LinearLayer, "_forward", wrong)
    who = form or "planned"
    with pytest.raises(WrongResult, match=rf"{who} at {row.id}: its error is"):
        run(ours, row)


def test_a_wrong_delta_of_the_baseline_is_never_timed(ours: Contender) -> None:
    message = r"vllm on two streams at tiny\.m6\.r8: its error is"
    with pytest.raises(WrongResult, match=message):
        run(ours, LARGER, vllm(ours, factor=0.9))


def test_the_second_stream_of_vllm_stores_into_zeros_and_is_added_behind_the_join() -> None:
    log: list[str] = []
    instance: Any = Mock()

    def store(x: Tensor, out: Tensor) -> Tensor:
        log.append(f"store into {out.tolist()}")
        return out + 1

    def fork(
        first: Callable[[], Tensor], second: Callable[[], Tensor], *resources: object
    ) -> tuple[Tensor, Tensor]:
        results = first(), second()
        log.append(f"join {results[0].tolist()}")
        return results

    def base() -> Tensor:
        log.append("base")
        return torch.full((1, 2), 5.0)

    instance.store.side_effect = store
    out = DualStream(fork, instance, 2)(base, torch.zeros(1, 3))
    assert log == ["base", "store into [[0.0, 0.0]]", "join [[5.0, 5.0]]"]
    assert out.tolist() == [[6.0, 6.0]]


def test_a_fork_that_cannot_be_had_gives_a_reason_as_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load_fork(MACHINE) == "its second stream needs a GPU" or MACHINE.device == "cuda"
    gpu = Machine("cuda", "a test of the import", (9, 0), 132, 1)
    monkeypatch.setattr(vllm_streams.importlib, "import_module", Mock(side_effect=OSError("no")))
    assert load_fork(gpu) == "its fork and join cannot be imported: OSError: no"
    other = Machine("cuda", "a test of the name", (9, 0), 132, 1)
    monkeypatch.setattr(vllm_streams.importlib, "import_module", lambda name: object())
    reason = load_fork(other)
    assert isinstance(reason, str)
    assert "no attribute 'maybe_execute_in_parallel'" in reason


@pytest.mark.parametrize("model", SMALL)
@pytest.mark.parametrize("adapted", Adapted)
def test_an_input_projection_is_timed_in_every_form_and_as_planned(
    ours: Contender, model: str, adapted: Adapted
) -> None:
    found = run(ours, GDNRow(model, adapted, 5))
    assert isinstance(found, GDNFigures)
    assert found.forms.us == {"serial": 10.0, "dual": 20.0, "merged": 30.0, "beside": 40.0}
    assert (found.forms.chosen, found.forms.planned_us) == ("beside", 50.0)
    assert all(0.3 < error < 1.5 for error in found.errors.values())


def test_adapters_on_qkvz_alone_change_no_column_of_ba(
    ours: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: dict[Adapted, tuple[Tensor, ...]] = {}
    right = InputProjection._forward
    for adapted in Adapted:

        def kept(
            self: InputProjection, x: Tensor, form: str | None, adapted: Adapted = adapted
        ) -> tuple[Tensor, ...]:
            outputs[adapted] = right(self, x, form)
            return outputs[adapted]

        monkeypatch.setattr(InputProjection, "_forward", kept)
        run(ours, GDNRow("apart", adapted, 6))
    (base, base_ba), (_, some_ba) = outputs[Adapted.NONE], outputs[Adapted.QKVZ]
    assert torch.equal(base_ba, some_ba)
    assert not torch.equal(base, outputs[Adapted.QKVZ][0])
    assert not torch.equal(base_ba, outputs[Adapted.BOTH][1])


@pytest.mark.parametrize("form", ["serial", "dual", "merged", "beside", None])
def test_a_form_of_an_input_projection_with_a_wrong_result_is_never_timed(
    ours: Contender, form: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = InputProjection._forward

    def wrong(self: InputProjection, x: Tensor, wanted: str | None) -> tuple[Tensor, ...]:
        qkvz, ba = right(self, x, wanted)
        return qkvz, ba * 0.9 if wanted == form else ba

    monkeypatch.setattr(InputProjection, "_forward", wrong)
    with pytest.raises(WrongResult, match=rf"{form or 'planned'} at gdn\.apart\.both\.m5: "):
        run(ours, GDNRow("apart", Adapted.BOTH, 5))


@pytest.mark.parametrize("shared", [False, True])
def test_a_moe_layer_is_timed_in_every_form_and_as_planned(ours: Contender, shared: bool) -> None:
    found = run(ours, MoERow(shared, 5))
    assert isinstance(found, MoEFigures)
    assert found.forms.us == {"single": 10.0, "beside": 20.0, "dual": 30.0}
    assert (found.forms.chosen, found.forms.planned_us) == ("beside", 40.0)
    assert found.errors.keys() == {"single", "beside", "dual", "planned"}
    # as the other measurements of MoE layers: what a run refuses begins at 2
    assert all(0.3 < error < 2 for error in found.errors.values())


@pytest.mark.parametrize("form", ["single", "beside", "dual", None])
def test_a_form_of_a_moe_layer_with_a_wrong_result_is_never_timed(
    ours: Contender, form: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = MoELayer._forward

    def wrong(
        self: MoELayer, x: Tensor, routes: Routes, shared: Any, wanted: MoEForm | None
    ) -> Tensor:
        out = right(self, x, routes, shared, wanted)
        return out * 0.9 if wanted is (form and MoEForm[form.upper()]) else out

    monkeypatch.setattr(MoELayer, "_forward", wrong)
    with pytest.raises(WrongResult, match=rf"{form or 'planned'} at moe\.shared\.m5: "):
        run(ours, MoERow(True, 5))


def test_a_run_has_every_row_in_the_order_of_the_tables(
    ours: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loragate.bench.streams.in_turns", counted)
    lines: list[str] = []
    rows = (ROW, GDNRow("together", Adapted.BOTH, 5), MoERow(True, 5))
    found = run_streams(ours, vllm(ours), rows, MACHINE, lines.append)
    assert tuple(figures.row for figures in found.measured) == rows
    assert lines == [
        "[1/3] tiny.m1.r8: base 10.0, one stream +10.0, two +30.0, planned +45.0, "
        "baseline with two +70.0",
        "[2/3] gdn.together.both.m5: serial 10.0, dual 20.0, merged 30.0, beside 40.0, "
        "planned (beside) 50.0",
        "[3/3] moe.shared.m5: single 10.0, beside 20.0, dual 30.0, planned (beside) 40.0",
    ]


def test_a_baseline_that_cannot_take_a_linear_layer_is_refused_before_anything_runs(
    ours: Contender,
) -> None:
    theirs = vllm(replace(ours, have=replace(ours.have, sites=frozenset({Site.MOE_DELTA}))))
    with pytest.raises(Unavailable, match="vllm: site dense_delta is not supported"):
        run_streams(ours, theirs, [ROW], MACHINE, print)
