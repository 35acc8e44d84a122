"""Results of `bench streams`: ratios, bars and the record, derived from raw medians. Pure.

Invariant: as in figures.py, everything that is printed or judged derives from the record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from loragate.bench.bars import Bar, geometric_mean, refuse_newer, worst_of
from loragate.bench.streams_measured import (
    GDNFigures,
    LinearFigures,
    MoEFigures,
    StreamMeasured,
    layer_payload,
    linear_payload,
    read_gdn,
    read_linear,
    read_moe,
)
from loragate.bench.streams_rows import stream_rows

SCHEMA = 1
MAX_MEAN_RATIO = 0.30
MAX_DOWN_US = 3.0
MAX_OTHERS_US = 4.0
SMALL_TOKENS, SMALL_RANK = 1, 16
MAX_PLAN_RATIO = 1.02
MAX_BEST_DUAL_RATIO = 0.85
MAX_GDN_PLAN_RATIO = 1.03


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """`baseline` is None where there was nothing to compare with."""

    candidate: str
    baseline: str | None
    measured: tuple[StreamMeasured, ...]

    @property
    def linears(self) -> tuple[LinearFigures, ...]:
        return tuple(m for m in self.measured if isinstance(m, LinearFigures))

    @property
    def listed(self) -> tuple[LinearFigures, ...]:
        """Linear layers of the table, without those that were drawn."""
        return tuple(figures for figures in self.linears if figures.row.seed is None)

    @property
    def gdns(self) -> tuple[GDNFigures, ...]:
        return tuple(m for m in self.measured if isinstance(m, GDNFigures))

    @property
    def moes(self) -> tuple[MoEFigures, ...]:
        return tuple(m for m in self.measured if isinstance(m, MoEFigures))

    @property
    def seed(self) -> int | None:
        """What rows were drawn from; None where no such row was measured."""
        return next((f.row.seed for f in self.linears if f.row.seed is not None), None)

    @property
    def complete(self) -> bool:
        rows = tuple(figures.row for figures in self.measured)
        return self.seed is not None and rows == stream_rows(self.seed)

    def best_dual(self, layer: str | None = None) -> LinearFigures | None:
        """The row of the table where the second stream gains most, of one layer or of all."""
        found = [f for f in self.listed if f.dual_ratio and layer in (None, f.row.layer)]
        return min(found, key=lambda f: f.dual_ratio or 0.0, default=None)

    def bars(self) -> tuple[Bar, ...]:
        return (*self._linear_bars(), self._gdn_bar(), self._moe_bar())

    def _linear_bars(self) -> tuple[Bar, ...]:
        added = f"added time over that of {self.baseline or 'a baseline'} with two streams"
        small = f"added time at M={SMALL_TOKENS}, rank {SMALL_RANK}, us"
        best = self.best_dual()
        return (
            Bar(f"{added}, geometric mean", MAX_MEAN_RATIO, self.mean_ratio),
            Bar(f"{small}: down", MAX_DOWN_US, self._small(["down"])),
            Bar(f"{small}: qkv and gate_up", MAX_OTHERS_US, self._small(["qkv", "gate_up"])),
            Bar(
                "linear layer, planned form over the best one of one stream, worst row",
                MAX_PLAN_RATIO,
                worst_of(figures.plan_ratio for figures in self.linears),
            ),
            Bar(
                "linear layer, added time with two streams over the best with one, best row",
                MAX_BEST_DUAL_RATIO,
                None if best is None else best.dual_ratio,
                note="" if best is None else best.row.id,
            ),
        )

    def _gdn_bar(self) -> Bar:
        return Bar(
            "input projection of a gated delta net, planned form over the fastest, worst row",
            MAX_GDN_PLAN_RATIO,
            worst_of(figures.plan_ratio for figures in self.gdns),
        )

    def _moe_bar(self) -> Bar:
        return Bar(
            "MoE layer, planned form over that of one stream, worst row",
            MAX_PLAN_RATIO,
            worst_of(figures.plan_ratio for figures in self.moes),
        )

    @property
    def mean_ratio(self) -> float | None:
        return geometric_mean(figures.ratio for figures in self.linears)

    def _small(self, layers: Sequence[str]) -> float | None:
        """The most that the plan adds to a decode step of these layers; None if one is missing."""
        found = {
            figures.row.layer: figures.planned_added_us
            for figures in self.listed
            if (figures.row.tokens, figures.row.rank) == (SMALL_TOKENS, SMALL_RANK)
        }
        return worst_of(found.get(layer) for layer in layers)

    def payload(self) -> dict[str, Any]:
        """JSON record of this run; `from_payload` reads it."""
        return {
            "schema": SCHEMA,
            "candidate": self.candidate,
            "baseline": self.baseline,
            "seed": self.seed,
            "expected": len(stream_rows()),
            "executed": len(self.measured),
            "linears": [linear_payload(figures) for figures in self.linears],
            "gdns": [layer_payload(figures) for figures in self.gdns],
            "moes": [layer_payload(figures) for figures in self.moes],
            "bars": [asdict(bar) | {"verdict": bar.verdict.value} for bar in self.bars()],
        }

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Self:
        """Raises ValueError for a record of a newer schema, KeyError for a field that is not
        there."""
        refuse_newer(payload["schema"], SCHEMA)
        measured: list[StreamMeasured] = [read_linear(linear) for linear in payload["linears"]]
        measured += [read_gdn(gdn) for gdn in payload["gdns"]]
        measured += [read_moe(moe) for moe in payload["moes"]]
        return cls(payload["candidate"], payload["baseline"], tuple(measured))
