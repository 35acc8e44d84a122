"""Times input projections of a gated delta net in all forms.

Invariant: a form is timed only after its result was compared with fp64. A layer has buffers for
the largest step of the table, as in a server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from loragate.bench.contender import Contender
from loragate.bench.lorakernels_streams import InputProjection
from loragate.bench.streams_measured import GDNFigures
from loragate.bench.streams_rows import GDN_FORMS, GDN_SHAPES, GDN_TOKENS, Adapted, GDNRow
from loragate.bench.streams_steps import (
    SEED,
    calls_of,
    check_calls,
    draw_base,
    draw_input,
    form_times,
)
from loragate.bench.timer import Clock
from loragate.core.machine import Machine
from loragate.inputs import DataKind, make_pool
from loragate.inputs.pool_changes import without_slice
from loragate.protocol import BaseLayer, Pool


def measure_gdns(
    rows: Sequence[GDNRow], candidate: Contender, machine: Machine, clock: Clock
) -> Iterator[GDNFigures]:
    """Rows that share a layer have to be adjacent. Raises WrongResult."""
    for largest, group in groupby(rows, key=lambda row: replace(row, tokens=max(GDN_TOKENS))):
        case, shape = largest.case, GDN_SHAPES[largest.model]
        base, pool = draw_base(case, machine), _make_pool(largest, candidate, machine)
        layer = InputProjection(shape, case, base, pool)
        for row in group:
            yield _measure_row(row, layer, base, pool, machine, clock)


def _make_pool(row: GDNRow, candidate: Contender, machine: Machine) -> Pool:
    pool = make_pool(row.case, SEED, DataKind.SIGNED, machine, candidate.have)
    shape = GDN_SHAPES[row.model]
    if row.adapted is Adapted.QKVZ:
        for part in range(len(shape.ba)):
            pool = without_slice(pool, len(shape.qkvz) + part)
    return pool


def _measure_row(
    row: GDNRow,
    layer: InputProjection,
    base: BaseLayer,
    pool: Pool,
    machine: Machine,
    clock: Clock,
) -> GDNFigures:
    x, token_slots = (
        draw_input(row.case, machine),
        torch.tensor(row.token_slots, dtype=torch.int32),
    )
    layer.prepare(token_slots)
    calls = calls_of(layer, x, GDN_FORMS)
    errors = check_calls(calls, row.id, row.case, (x, token_slots), base, pool)
    times = clock(calls)
    return GDNFigures(row, form_times(layer, row.tokens, GDN_FORMS, times), errors)
