"""Results of `bench streams`: ratios, bars and the record, derived from raw medians. Pure.

Invariant: as in figures.py, everything that is printed or judged derives from the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from loragate.bench.bars import Bar, geometric_mean, refuse_newer, worst_of
from loragate.bench.rows import Linear
from loragate.bench.streams_rows import (
    DUAL_STREAM_FORMS,
    GDN_FORMS,
    MOE_SINGLE,
    SINGLE_STREAM_FORMS,
    Adapted,
    GDNRow,
    LinearRow,
    MoERow,
    stream_rows,
)

SCHEMA = 1
MAX_MEAN_RATIO = 0.30
MAX_DOWN_US = 3.0
MAX_OTHERS_US = 4.0
SMALL_TOKENS, SMALL_RANK = 1, 16
MAX_PLAN_RATIO = 1.02
MAX_BEST_DUAL_RATIO = 0.85
MAX_GDN_PLAN_RATIO = 1.03
# what a delta counts at least that a second stream hides. Two timings of one form differed by at
# most 0.44 in 82 pairs on bases of up to 60 us; longer bases hide none, and differ by more
NOISE_US = 0.5


@dataclass(frozen=True, slots=True)
class FormTimes:
    """Base and delta in each form, medians in microseconds a call. `chosen` is the form that the
    plan takes with the switch on, and `planned_us` the time of the layer when the plan chooses."""

    us: Mapping[str, float]
    chosen: str
    planned_us: float

    def of(self, form: str) -> float:
        """The chosen form was timed twice, as itself and as the plan's choice. These are the same
        launches, and their mean keeps the noise of one out of a comparison with the other."""
        alone = self.us[form]
        return (alone + self.planned_us) / 2 if form == self.chosen else alone

    def fastest(self, forms: Iterable[str]) -> float:
        """Of the forms that a batch of this size can take."""
        return min(self.of(form) for form in forms if form in self.us)

    def over_fastest(self, forms: Iterable[str]) -> float:
        """The time of the chosen form over that of the fastest of `forms`."""
        return self.of(self.chosen) / self.fastest(forms)


@dataclass(frozen=True, slots=True)
class BaselineTimes:
    """Base and delta of the baseline, medians in microseconds a call: one after the other, and
    beside each other, which is None where the baseline offers no second stream."""

    sequential_us: float
    dual_us: float | None


@dataclass(frozen=True, slots=True)
class LinearFigures:
    """`errors`: for each way to run the layer its rms error over that of a plain computation."""

    row: LinearRow
    base_us: float
    forms: FormTimes
    baseline: BaselineTimes | None
    errors: Mapping[str, float]

    @property
    def planned_added_us(self) -> float:
        """By both timings of the chosen form."""
        return self.forms.of(self.forms.chosen) - self.base_us

    def added_us(self, form: str) -> float:
        return self.forms.us[form] - self.base_us

    @property
    def dual_added_us(self) -> float:
        """In the best form of two streams."""
        return self.forms.fastest(DUAL_STREAM_FORMS) - self.base_us

    @property
    def baseline_added_us(self) -> float | None:
        """With the second stream of the baseline."""
        theirs = None if self.baseline is None else self.baseline.dual_us
        return None if theirs is None else theirs - self.base_us

    @property
    def ratio(self) -> float | None:
        """What our plan adds, at least NOISE_US, over what the second stream of the baseline adds;
        None where the baseline seems to add nothing."""
        theirs = self.baseline_added_us
        return _over(self.planned_added_us, 0.0 if theirs is None else theirs)

    @property
    def dual_ratio(self) -> float | None:
        """What the best form of two streams adds, at least NOISE_US, over what the best one of one
        stream adds; None where that seems to add nothing."""
        single = self.forms.fastest(SINGLE_STREAM_FORMS) - self.base_us
        return _over(self.dual_added_us, single)

    @property
    def plan_ratio(self) -> float:
        """The planned form over the best form of one stream, base included."""
        return self.forms.over_fastest(SINGLE_STREAM_FORMS)


def _over(added_us: float, theirs_us: float) -> float | None:
    return max(added_us, NOISE_US) / theirs_us if theirs_us > 0 else None


@dataclass(frozen=True, slots=True)
class GDNFigures:
    """An input projection; `errors` as for linear layers."""

    row: GDNRow
    forms: FormTimes
    errors: Mapping[str, float]

    @property
    def plan_ratio(self) -> float:
        """The planned form over the fastest of all forms."""
        return self.forms.over_fastest(GDN_FORMS)


@dataclass(frozen=True, slots=True)
class MoEFigures:
    """A MoE layer, alignment included; `errors` as for linear layers."""

    row: MoERow
    forms: FormTimes
    errors: Mapping[str, float]

    @property
    def plan_ratio(self) -> float:
        """The planned form over that of one stream."""
        return self.forms.over_fastest((MOE_SINGLE,))


StreamMeasured = LinearFigures | GDNFigures | MoEFigures


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
            "linears": [_linear_payload(figures) for figures in self.linears],
            "gdns": [_payload(figures) for figures in self.gdns],
            "moes": [_payload(figures) for figures in self.moes],
            "bars": [asdict(bar) | {"verdict": bar.verdict.value} for bar in self.bars()],
        }

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Self:
        """Raises ValueError for a record of a newer schema, KeyError for a field that is not
        there."""
        refuse_newer(payload["schema"], SCHEMA)
        measured: list[StreamMeasured] = [_read_linear(linear) for linear in payload["linears"]]
        measured += [_read_gdn(gdn) for gdn in payload["gdns"]]
        measured += [_read_moe(moe) for moe in payload["moes"]]
        return cls(payload["candidate"], payload["baseline"], tuple(measured))


def _linear_payload(figures: LinearFigures) -> dict[str, Any]:
    return asdict(figures) | {
        # for readers of the file; `from_payload` derives these again
        "id": figures.row.id,
        "planned_added_us": figures.planned_added_us,
        "ratio": figures.ratio,
        "dual_ratio": figures.dual_ratio,
        "plan_ratio": figures.plan_ratio,
    }


def _payload(figures: GDNFigures | MoEFigures) -> dict[str, Any]:
    return asdict(figures) | {"id": figures.row.id, "plan_ratio": figures.plan_ratio}


def _read_linear(record: Mapping[str, Any]) -> LinearFigures:
    row, baseline = dict(record["row"]), record["baseline"]
    shape = row.pop("shape")
    return LinearFigures(
        LinearRow(shape=Linear(shape["in_features"], tuple(shape["slices"])), **row),
        record["base_us"],
        FormTimes(**record["forms"]),
        None if baseline is None else BaselineTimes(**baseline),
        record["errors"],
    )


def _read_gdn(record: Mapping[str, Any]) -> GDNFigures:
    row = record["row"]
    return GDNFigures(
        GDNRow(row["model"], Adapted(row["adapted"]), row["tokens"]),
        FormTimes(**record["forms"]),
        record["errors"],
    )


def _read_moe(record: Mapping[str, Any]) -> MoEFigures:
    forms = FormTimes(**record["forms"])
    return MoEFigures(MoERow(**record["row"]), forms, record["errors"])
