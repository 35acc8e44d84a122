"""What a plan of the dense kernels follows from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lorakernels.batch.metadata import tile_height
from lorakernels.dense.one_wave import Work
from lorakernels.runtime.tuning import DEFAULT, Tuning

# ranks beyond which a split-K partial is long to read
MODERATE_RANKS = 64


@dataclass(frozen=True, slots=True)
class DenseShape:
    """What a plan depends on: the sizes of a batch and a layer, and the constants measured on
    the family of their GPU."""

    num_rows: int
    in_features: int
    slice_widths: tuple[int, ...]
    rank: int
    # bytes of one element of x, A, B and out
    itemsize: int
    # compared, but left out of the hash, which it would make slow
    tuning: Tuning = field(default=DEFAULT, repr=False, hash=False)
    # whether the shrink runs beside the base product, which hides it
    beside: bool = False

    @property
    def ranks_of_all_slices(self) -> int:
        return len(self.slice_widths) * self.rank

    @property
    def height(self) -> int:
        return tile_height(self.num_rows, self.tuning)

    @property
    def planned(self) -> DenseShape:
        """The shape whose plan this one takes: itself, unless all batches take one plan."""
        rows = self.tuning.dense.planned_rows
        return self if rows is None else replace(self, num_rows=rows)

    @property
    def is_deep(self) -> bool:
        """Whether the shrink adds up many features."""
        return self.in_features >= self.tuning.dense.deep

    @property
    def is_wide(self) -> bool:
        """Whether the expand has many columns."""
        return max(self.slice_widths) > self.tuning.dense.wide

    @property
    def is_one_wave(self) -> bool:
        """Whether a batch is between decode and prefill. None of fp32 is, which has no tensor
        cores."""
        return 64 <= self.height < self.tuning.dense.prefill_height and self.itemsize == 2

    @property
    def may_limit_registers(self) -> bool:
        """Whether latency may count most. Not where a batch of any size takes this plan. fp32 has
        no tensor cores, and its kernels have no registers left."""
        is_planned = self.tuning.dense.planned_rows is not None
        return self.height <= 32 and self.itemsize == 2 and not is_planned

    @property
    def usual_tiles(self) -> int:
        """Tiles of a batch of the usual number of adapters, half of whose last ones are not
        full."""
        return -(-self.num_rows // self.height) + self.tuning.dense.usual_slots // 2

    @property
    def work(self) -> Work:
        """Of as many tiles as may be expected at most."""
        return Work(
            # more than `usual_tiles`: a tile that was not expected would begin a second wave
            tiles=-(-self.num_rows // self.height) + 3 * self.tuning.dense.usual_slots // 4,
            height=self.height,
            rank=self.rank,
            in_features=self.in_features,
            slice_widths=self.slice_widths,
            multiprocessors=self.tuning.dense.multiprocessors,
        )

    @property
    def fewest_work(self) -> Work:
        """Of as few tiles as the usual number of adapters can have."""
        full_tiles = -(-self.num_rows // self.height)
        fewest = max(full_tiles, min(self.num_rows, self.tuning.dense.usual_slots))
        return replace(self.work, tiles=fewest)

    @property
    def work_of_few_rows(self) -> Work:
        """Of `usual_tiles`, none of them without a row."""
        return replace(self.work, tiles=min(self.num_rows, self.usual_tiles))
