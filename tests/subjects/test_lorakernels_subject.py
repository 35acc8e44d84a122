"""The project's own kernels as a subject: a few small cases end to end, and what the translation
must not do for the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import detect_machine, select_interpreter
from loragate.core.verdict import OracleName, Verdict
from loragate.execution.session import base_of
from loragate.inputs import DataKind, Dead, make_pool
from loragate.matrix.case import (
    Activation,
    Base,
    Beside,
    Bias,
    Buffers,
    Case,
    Cut,
    Dtype,
    Execution,
    ExpertMap,
    GateUp,
    Ids,
    Layout,
    Loading,
    Mix,
    Parallel,
    Path,
    Placement,
    Plans,
    Products,
    Quantisation,
    Ranks,
    RouterWeights,
    Sharding,
    Sharing,
    Site,
    Source,
    Streams,
    Write,
)
from loragate.matrix.engine_case import Graphs
from loragate.protocol import Guard, HotPath, Rounding, Trial, unsupported
from loragate.run.trial import run_trial
from loragate.subjects import find_subject
from loragate.subjects.lorakernels.moe_layer import MoELayer
from loragate.subjects.lorakernels.subject import slot_memory
from lorakernels.moe.delta.plan import MAX_FUSED_RANK
from lorakernels.runtime import streams
from lorakernels.runtime.collectives import SimulatedRanks

select_interpreter()
CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=11,
    in_features=40,
    slices=(24, 16),
    rank=6,
    slots=3,
    dtype=Dtype.BF16,
    oracles=(OracleName.REFERENCE, OracleName.EXACT, OracleName.CANARY, OracleName.SEQUENCE),
)
LINEAR = replace(CASE, site=Site.LORA_LINEAR)
MOE = replace(CASE, site=Site.MOE_DELTA, experts=4, top_k=2)
LAYER = replace(
    CASE,
    site=Site.MOE_LAYER,
    tokens=5,
    in_features=16,
    slices=(16, 16),
    slots=1,
    experts=2,
    top_k=1,
    router=RouterWeights.OUTPUT,
)
SMALL = {
    "delta_column_slice": replace(CASE, layout=Layout.COLUMN_SLICE),
    "delta_padded_rows": replace(CASE, layout=Layout.PADDED_ROWS, dtype=Dtype.FP16),
    "column_parallel": replace(LINEAR, parallel=Parallel.COLUMN, tp=2),
    "delta_net": replace(
        CASE, site=Site.GDN_IN_PROJ, slices=(40, 24, 4, 4), key_heads=2, tp=4, mix=Mix.SHUFFLED
    ),
    # whose number of dimensions and parts must not make another graph of each batch
    "compiled_with_more_dimensions": replace(
        LINEAR, tokens=9, input_dims=3, oracles=(OracleName.COMPILE,)
    ),
    # of a dtype whose values torch cannot compare
    "compiled_experts_of_8_bits": replace(
        LAYER, quantisation=Quantisation.FP8, oracles=(OracleName.COMPILE,)
    ),
    # what they refuse, or a server does in their place
    "guarded_stacks": replace(CASE, buffers=Buffers.STACKS, oracles=(OracleName.GUARD,)),
    "guarded_on_the_device": replace(CASE, loading=Loading.DEVICE, oracles=(OracleName.GUARD,)),
    "guarded_places": replace(LAYER, placement=Placement.REPLICATED, oracles=(OracleName.GUARD,)),
    "guarded_interleaved": replace(LAYER, gate_up=GateUp.INTERLEAVED, oracles=(OracleName.GUARD,)),
    "embedding": replace(
        CASE, site=Site.EMBEDDING, slices=(24,), tp=2, ids=Ids.UNKNOWN, mix=Mix.SHUFFLED
    ),
    "row_parallel": replace(LINEAR, parallel=Parallel.ROW, tp=2, dtype=Dtype.FP32),
    "layer_of_rows_apart": replace(
        CASE,
        site=Site.MOE_LAYER,
        slices=(24, 24),
        experts=4,
        top_k=2,
        router=RouterWeights.OUTPUT,
        layout=Layout.COLUMN_SLICE,
        oracles=(OracleName.REFERENCE, OracleName.HOT_PATH),
    ),
    "experts_elsewhere": replace(MOE, expert_map=ExpertMap.PARALLEL, path=Path.TWO_KERNEL),
    "experts_stored": replace(MOE, write=Write.STORE, sharing=Sharing.SHARED_A, path=Path.ONE_SHOT),
    "experts_weighted": replace(
        MOE,
        source=Source.PAIR,
        router=RouterWeights.OUTPUT,
        sharing=Sharing.SHARED_B,
        path=Path.SMALL_BATCH,
    ),
}


def trial_of(case: Case) -> Trial:
    machine, subject = detect_machine(), find_subject("lorakernels")
    have = subject.capabilities(machine)
    assert not isinstance(have, str)
    return Trial(case, subject, have, machine, seed=5)


@pytest.mark.parametrize("name", SMALL)
def test_a_small_case_passes_its_oracles(name: str) -> None:
    trial = trial_of(SMALL[name])
    assert unsupported(trial.case, trial.capabilities) is None
    for judgement in run_trial(trial):
        assert judgement.verdict is Verdict.PASS, judgement


@pytest.mark.parametrize(("ids", "seed"), [(2, 2), (3, 2)])
def test_rows_of_few_ids_whose_errors_are_alike_raise_no_alarm(ids: int, seed: int) -> None:
    few = replace(
        CASE,
        site=Site.EMBEDDING,
        tokens=2048,
        in_features=ids,
        slices=(13,),
        rank=14,
        slots=1,
        dtype=Dtype.FP16,
        mix=Mix.SINGLE,
        ranks=Ranks.FULL,
        oracles=(OracleName.REFERENCE,),
    )
    (judgement,) = run_trial(replace(trial_of(few), seed=seed))
    assert judgement.verdict is Verdict.PASS, judgement
    # at these seeds all errors of a slot have one sign
    assert abs(judgement.metrics["sigmas"]) > 0.5


def test_it_supports_everything_in_the_interpreter() -> None:
    have = trial_of(CASE).capabilities
    assert have.sites == frozenset(Site)
    everything = {
        "dtype": frozenset(Dtype),
        "execution": frozenset(Execution),
        "parallel": frozenset(Parallel),
        "path": frozenset(Path),
        "quantisation": frozenset(Quantisation),
        "ids": frozenset(Ids),
        "base": frozenset(Base),
        "bias": frozenset(Bias),
        "activation": frozenset(Activation),
        "gate_up": frozenset(GateUp),
        "placement": frozenset(Placement),
        "expert_bias": frozenset(Bias),
        "buffers": frozenset(Buffers),
        "cut": frozenset(Cut),
        "input_dims": range(2, 4),
        "loading": frozenset(Loading),
        "sharding": frozenset(Sharding),
        "streams": frozenset(Streams),
        "beside": frozenset(Beside),
        "products": frozenset(Products),
        "plans": frozenset(Plans),
    }
    assert {axis: have.supports[axis] for axis in everything} == everything
    assert have.supports["rank"] == range(1, 513)
    # of the other axes all values are taken to be supported
    of_engines = {"model", "speculation", "graphs", "active", "targets", "weights"}
    of_engines |= {"logprobs", "requests", "ends"}
    assert have.supports.keys() == {*everything, *of_engines, "rank", "heads", "spare_rows"}
    # without a GPU
    assert have.supports["graphs"] == {Graphs.NONE}
    assert have.deterministic
    assert have.skips_dead_ranks
    assert have.rank_per_slice
    assert have.guards == frozenset(Guard)
    assert have.hot_path == frozenset(HotPath)
    assert have.work_follows_tiles
    assert have.traceable is not None
    untraced = {"sharding": Sharding.RANK, "plans": Plans.ONE}
    assert have.traceable(CASE)
    assert not any(have.traceable(replace(CASE, **{name: untraced[name]})) for name in untraced)


@pytest.mark.parametrize(
    ("case", "size"),
    [
        (CASE, 0),
        (MOE, 0),
        # the output
        (LINEAR, 11 * 40 * 2),
        (replace(LINEAR, parallel=Parallel.ROW), 0),
        (replace(CASE, site=Site.GDN_IN_PROJ), 2 * 11 * 40 * 2),
        # which ids are here
        (replace(CASE, site=Site.EMBEDDING), 11 * 11),
        (LAYER, 0),
        (replace(LAYER, layout=Layout.COLUMN_SLICE), 5 * 16 * 2),
        (replace(LINEAR, tp=2), None),
        (replace(LAYER, ep=2), None),
        (replace(LAYER, streams=Streams.DUAL), None),
        (replace(LAYER, quantisation=Quantisation.FP8), None),
        (replace(LAYER, placement=Placement.REPLICATED), None),
    ],
)
def test_it_promises_how_many_bytes_a_step_allocates(case: Case, size: int | None) -> None:
    allocates = trial_of(CASE).capabilities.allocates
    assert allocates is not None
    assert allocates(case) == size


@pytest.mark.parametrize(
    ("path", "rank", "rounds"),
    [
        (Path.SMALL_BATCH, MAX_FUSED_RANK, False),
        (Path.SMALL_BATCH, MAX_FUSED_RANK + 1, True),
        (Path.PLAN, 6, True),
        (Path.ONE_SHOT, 6, True),
    ],
)
def test_it_rounds_nothing_but_shrunk_values_and_not_even_these_in_a_small_batch(
    path: Path, rank: int, rounds: bool
) -> None:
    promised = trial_of(CASE).capabilities.roundings(replace(MOE, path=path, rank=rank))
    assert promised == (frozenset({Rounding.SHRUNK}) if rounds else frozenset())


def test_streams_are_those_of_the_module_that_stands_for_a_gpu() -> None:
    streams_from, module = trial_of(CASE).capabilities.streams_from, object()
    assert streams_from is not None
    with streams_from(module):
        assert streams.stream_module(torch.device("cpu")) is module
    assert streams.stream_module(torch.device("cpu")) is None


def test_all_memory_of_a_slot_is_shown_of_every_rank() -> None:
    trial = trial_of(replace(LINEAR, tp=2))
    step = trial.subject.open(trial.case, trial.machine, base_of(trial, DataKind.SIGNED))
    found = slot_memory(step.own, 1)
    ranks = step.own.ranks  # type: ignore[union-attr]
    wanted = [part[1] for r in ranks for part in (r.slots.a, r.slots.b, r.slots.scales)]
    assert [part.data_ptr() for part in found] == [part.data_ptr() for part in wanted]


def test_dead_ranks_hold_nan_where_the_pool_does_and_zeros_are_left_to_the_reset() -> None:
    from loragate.subjects.lorakernels.dead_ranks import spoil_dead_ranks
    from lorakernels.dense.weights import SlotWeights

    trial = trial_of(replace(CASE, slots=1, ranks=Ranks.MIXED))
    pool = make_pool(
        trial.case, 5, DataKind.EXACT, trial.machine, trial.capabilities, dead=Dead.NAN
    )
    weights = SlotWeights(
        num_slots=1,
        slice_widths=(24, 16),
        in_features=40,
        rank=6,
        dtype=torch.bfloat16,
        device=trial.machine.device,
    )
    weights.a.fill_(7)
    clean = make_pool(trial.case, 5, DataKind.EXACT, trial.machine, trial.capabilities)
    spoil_dead_ranks(weights, 0, clean)
    assert (weights.a == 7).all()
    spoil_dead_ranks(weights, 0, pool)
    # one slice is full, the other absent
    assert sorted(pool.ranks[0]) == [0, 6]
    full, absent = pool.ranks[0].index(6), pool.ranks[0].index(0)
    assert (weights.a[0, full] == 7).all()
    assert weights.a[0, absent].isnan().all()
    columns = (weights.b[0, :24], weights.b[0, 24:])
    assert not columns[full].isnan().any()
    assert columns[absent].isnan().all()


def test_base_rows_at_the_end_are_declared_as_padding() -> None:
    trial = trial_of(CASE)
    instance = trial.subject.open(CASE, trial.machine, None)
    metadata = instance.own.metadata  # type: ignore[union-attr]
    for slots in ([2, -1, 0, -1, -1], [-1, -1], [1]):
        instance.prepare(torch.tensor(slots, dtype=torch.int32))
        assert metadata.num_rows == len(slots)
        assert metadata.token_slots[: len(slots)].tolist() == slots
        assert (metadata.token_slots[len(slots) :] == -1).all()


@pytest.mark.parametrize("streams", Streams)
def test_ranks_are_added_up_from_the_last_one_on_in_any_form(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    # another order loses nothing here
    of_ranks = torch.tensor([1.0, -1.0, 2.0**-30]).unbind()

    def part(
        layer: MoELayer, index: int, x: Tensor, *others: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        beside = others[2] if len(others) > 2 else None
        return of_ranks[index] if beside is None else of_ranks[index] + beside(x)

    monkeypatch.setattr(MoELayer, "_part", part)
    layer: Any = object.__new__(MoELayer)
    layer.case = replace(CASE, site=Site.MOE_LAYER, tp=3, streams=streams)
    layer.is_dual, layer.is_quantised, layer.input_dims = streams is Streams.DUAL, False, 2
    layer.ranks, layer.groups = [None] * 3, [SimulatedRanks(3)]
    assert layer.apply(torch.zeros(1, 1), torch.zeros(()), None).item() == 0.0
