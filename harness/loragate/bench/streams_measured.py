"""What `bench streams` measures of a layer: medians, the ratios that follow from them, and their
record. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

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
)

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


def linear_payload(figures: LinearFigures) -> dict[str, Any]:
    """JSON record of a linear layer; `read_linear` reads it."""
    return asdict(figures) | {
        # for readers of the file; `from_payload` derives these again
        "id": figures.row.id,
        "planned_added_us": figures.planned_added_us,
        "ratio": figures.ratio,
        "dual_ratio": figures.dual_ratio,
        "plan_ratio": figures.plan_ratio,
    }


def layer_payload(figures: GDNFigures | MoEFigures) -> dict[str, Any]:
    """JSON record of another layer; `read_gdn` and `read_moe` read it."""
    return asdict(figures) | {"id": figures.row.id, "plan_ratio": figures.plan_ratio}


def read_linear(record: Mapping[str, Any]) -> LinearFigures:
    """Raises KeyError for a field that is not there, as the others do."""
    row, baseline = dict(record["row"]), record["baseline"]
    shape = row.pop("shape")
    return LinearFigures(
        LinearRow(shape=Linear(shape["in_features"], tuple(shape["slices"])), **row),
        record["base_us"],
        FormTimes(**record["forms"]),
        None if baseline is None else BaselineTimes(**baseline),
        record["errors"],
    )


def read_gdn(record: Mapping[str, Any]) -> GDNFigures:
    row = record["row"]
    return GDNFigures(
        GDNRow(row["model"], Adapted(row["adapted"]), row["tokens"]),
        FormTimes(**record["forms"]),
        record["errors"],
    )


def read_moe(record: Mapping[str, Any]) -> MoEFigures:
    forms = FormTimes(**record["forms"])
    return MoEFigures(MoERow(**record["row"]), forms, record["errors"])
