"""Results of `bench dense`: ratios, bars and the record, derived from raw medians. Pure.

Invariant: everything that is printed or judged derives from the raw figures of the record, so that
a record always gives the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from loragate.bench.bars import REFERENCE_BYTES_PER_S, Bar, geometric_mean, refuse_newer, worst_of
from loragate.bench.rows import DenseRow, dense_rows

SCHEMA = 1
MAX_MEAN_RATIO = 0.3
MAX_ROW_RATIO = 1.0
# of rows that decode steps have
DECODE_TOKENS = 64
MAX_DECODE_RATIO = 0.6
MAX_OVER_FLOOR = 1.8
AIMED_OVER_FLOOR = 1.3
PREFILL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Times:
    """Medians in microseconds a call. `with_lora_us` is base GEMM + delta, by subject."""

    base_us: float
    with_lora_us: Mapping[str, float]

    def added_us(self, subject: str) -> float:
        return self.with_lora_us[subject] - self.base_us

    def ratio(self, candidate: str, baseline: str | None) -> float | None:
        """None without a baseline, and where the noise is larger than what LoRA adds."""
        if baseline is None:
            return None
        ours, theirs = self.added_us(candidate), self.added_us(baseline)
        return ours / theirs if ours > 0 and theirs > 0 else None


@dataclass(frozen=True, slots=True)
class RowFigures:
    """`base_us` and `with_lora_us` with an L2 cache that holds what one call has left there for the
    next one; `cold` with none of the operands in it, None in older records. `errors` is the rms
    error of a subject over that of a plain computation in the same dtype."""

    row: DenseRow
    base_us: float
    with_lora_us: Mapping[str, float]
    errors: Mapping[str, float]
    cold: Times | None = None

    @property
    def warm(self) -> Times:
        return Times(self.base_us, self.with_lora_us)

    def added_us(self, subject: str) -> float:
        return self.warm.added_us(subject)

    def ratio(self, candidate: str, baseline: str | None) -> float | None:
        return self.warm.ratio(candidate, baseline)

    def floor_us(self, bytes_per_s: float = REFERENCE_BYTES_PER_S) -> float:
        return self.row.floor_bytes / bytes_per_s * 1e6

    def over_floor(self, subject: str) -> float:
        return self.added_us(subject) / self.floor_us()


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Building the metadata of one step, from a mapping on the CPU, medians in microseconds.

    `active` of `slots` slots have rows. `host_us`: until the call returns; `total_us`: until the
    device is done; `device_us`: on the device alone, None where a step cannot be captured.
    """

    subject: str
    tokens: int
    slots: int
    active: int
    host_us: float
    total_us: float
    device_us: float | None


@dataclass(frozen=True, slots=True)
class DenseFigures:
    """`baseline` is None where there was nothing to compare with."""

    candidate: str
    baseline: str | None
    copy_bytes_per_s: float
    rows: tuple[RowFigures, ...]
    steps: tuple[StepFigures, ...]

    @property
    def subjects(self) -> tuple[str, ...]:
        return (self.candidate, self.baseline) if self.baseline else (self.candidate,)

    @property
    def complete(self) -> bool:
        return tuple(figures.row for figures in self.rows) == dense_rows()

    def ratios(self) -> tuple[float | None, ...]:
        return tuple(figures.ratio(self.candidate, self.baseline) for figures in self.rows)

    def cold_ratios(self) -> tuple[float | None, ...]:
        """Of the rows that were measured with a cold L2 cache."""
        cold = (figures.cold for figures in self.rows if figures.cold)
        return tuple(times.ratio(self.candidate, self.baseline) for times in cold)

    def bars(self) -> tuple[Bar, ...]:
        ratios, cold = self.ratios(), self.cold_ratios()
        prefill = [f for f in self.rows if f.row.tokens == PREFILL_TOKENS]
        over = [figures.over_floor(self.candidate) for figures in prefill]
        decode = [f for f in self.rows if f.row.tokens <= DECODE_TOKENS]
        decode_ratios = [figures.ratio(self.candidate, self.baseline) for figures in decode]
        added = f"added time over {self.baseline or 'a baseline'}"
        return (
            Bar(f"{added}, geometric mean", MAX_MEAN_RATIO, geometric_mean(ratios)),
            Bar(f"{added}, worst row", MAX_ROW_RATIO, worst_of(ratios)),
            Bar(
                f"{added}, at most {DECODE_TOKENS} tokens, worst row",
                MAX_DECODE_RATIO,
                worst_of(decode_ratios),
            ),
            *([Bar(f"{added}, cold L2, worst row", MAX_ROW_RATIO, worst_of(cold))] if cold else []),
            Bar(
                f"added time over the byte floor at M={PREFILL_TOKENS}, worst row",
                MAX_OVER_FLOOR,
                worst_of(over),
                note=f"aim {AIMED_OVER_FLOOR}",
            ),
        )

    def payload(self) -> dict[str, Any]:
        """JSON record of this run; `from_payload` reads it."""
        return {
            "schema": SCHEMA,
            "candidate": self.candidate,
            "baseline": self.baseline,
            "copy_bytes_per_s": self.copy_bytes_per_s,
            "reference_bytes_per_s": REFERENCE_BYTES_PER_S,
            "expected": len(dense_rows()),
            "executed": len(self.rows),
            "rows": [_row_payload(self, figures) for figures in self.rows],
            "steps": [asdict(step) for step in self.steps],
            "bars": [asdict(bar) | {"verdict": bar.verdict.value} for bar in self.bars()],
        }

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Self:
        """Raises ValueError for a record of a newer schema, KeyError for a field that is not
        there."""
        refuse_newer(payload["schema"], SCHEMA)
        return cls(
            candidate=payload["candidate"],
            baseline=payload["baseline"],
            copy_bytes_per_s=payload["copy_bytes_per_s"],
            rows=tuple(
                RowFigures(
                    DenseRow(row["linear"], row["tokens"], row["rank"]),
                    row["base_us"],
                    row["with_lora_us"],
                    row["errors"],
                    Times(**row["cold"]) if row.get("cold") else None,
                )
                for row in payload["rows"]
            ),
            steps=tuple(StepFigures(**step) for step in payload["steps"]),
        )


def _row_payload(run: DenseFigures, figures: RowFigures) -> dict[str, Any]:
    return asdict(figures.row) | {
        "base_us": figures.base_us,
        "with_lora_us": dict(figures.with_lora_us),
        "errors": dict(figures.errors),
        "cold": asdict(figures.cold) if figures.cold else None,
        # for readers of the file; `from_payload` derives these again
        "added_us": {subject: figures.added_us(subject) for subject in run.subjects},
        "floor_us": figures.floor_us(),
        "floor_at_measured_copy_us": figures.floor_us(run.copy_bytes_per_s),
        "over_floor": figures.over_floor(run.candidate),
        "ratio": figures.ratio(run.candidate, run.baseline),
    }
