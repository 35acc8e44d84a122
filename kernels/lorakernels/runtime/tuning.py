"""The measured constants of all plans: one table for each family of GPUs.

A plan is a pure function of a shape and of these numbers. They decide how fast a launch is and
never whether its result is right: any table gives correct results on any device. Shapes of tiles
that follow from a kernel's registers and shared memory stay in the plans themselves, and so do the
costs of `dense/one_wave.py` and `dense/few_rows.py` and the limits of `dense/registers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import torch

from lorakernels.runtime.options import batch_invariant


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTuning:
    """Plans of linear layers."""

    # most rows of a batch whose tiles have 16, 32 and 64 rows; beyond, tiles have 128
    rows_of_height_16: int
    rows_of_height_32: int
    rows_of_height_64: int
    # from this tile height on a batch is a prefill: bandwidth counts, not latency
    prefill_height: int
    # programs that fill the device: more of them hide no more latency
    programs: int
    multiprocessors: int
    # of shared memory, the most that a program may have
    shared_bytes: int
    # programs that the tile axis has beyond full tiles: most batches have few partial tiles, and
    # the stride loop takes the rest
    partial_tiles: int
    # in_features from which a shrink is deep
    deep: int
    # columns of a slice beyond which an expand is wide
    wide: int
    # a base product of so many weights hides a shrink on a second stream, of so many rows
    dual_weights: int
    dual_rows: int
    # with so few ranks of all slices, of more rows: beyond those, the product has all
    # multiprocessors at work
    dual_ranks: int
    dual_more_rows: int
    # beyond so many ranks of all slices, A takes long to read next to the base weight
    dual_most_ranks: int
    # features from which a product of fewer weights hides a delta that is stored
    dual_features: int
    # most values of a delta that is stored on a second stream and added later: beyond, writing and
    # reading them takes longer than a product with B behind the base product
    stored_values: int
    # of a shrink on a second stream: split-K partials and programs for each tile of the batch, and
    # the most programs of all tiles
    splits_beside: int
    programs_beside: int
    most_programs_beside: int
    # adapters of a batch that the plans count on
    usual_slots: int
    # rows of the batch whose plan all batches take; None: each takes its own
    planned_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoETuning:
    """Plans of the MoE delta and of its tiles."""

    # adapters of a batch that the plans count on
    usual_slots: int
    # share of a tile that the pairs of a bucket must fill: fuller tiles leave so little space that
    # many a bucket needs a second one, which costs more than empty rows
    full: float
    # with fewer pairs, tiles of 64 are too few to keep all multiprocessors busy
    pairs_of_tall_tiles: int
    # programs that are enough for a split-K partial, or a block of columns, of its own: in
    # general, for shrinks of at most 32 ranks, and for shrinks of a decode batch
    programs: int
    programs_of_low_rank: int
    programs_of_decode: int
    # most pairs of a decode batch
    decode_pairs: int
    # most columns of a slice that one program of a one-shot kernel sweeps: with more of them
    # multiprocessors are idle at the end
    most_columns: int
    # tiles from which one-shot kernels keep all multiprocessors busy, up to rank 16 and above it
    many_tiles: int
    many_tiles_of_high_rank: int
    # tiles from which a one-shot kernel of rank 64 takes narrow blocks, and the number of pairs
    # below which it loads a stage further ahead
    narrow_block_tiles: int
    deep_pipeline_pairs: int
    # programs of one slice each with so little to do that one warp does it
    many_programs: int
    # programs that share the columns of few tiles
    part_programs: int
    # elements of x that the programs of a small batch may read, each for itself
    small_reads: int
    # most in_features of a small batch
    small_in_features: int
    # most pairs of a batch whose shrinks run on a second stream. 0: the expand that starts while
    # the shrink still runs hides it as well, without a launch of its own
    dual_pairs: int
    # pairs of the batch whose plan all batches take; None: each takes its own
    planned_pairs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignTuning:
    """Launches of the alignment of token-expert pairs. The spans are powers of two."""

    # buckets beyond which a program cannot hold a counter of each
    most_bins: int
    # counters of all spans beyond which they take too much memory: 4 bytes each
    most_counters: int
    # most pairs that one program sorts in its registers
    pairs_at_once: int
    # most pairs that are compared with each other, and how many of them a program compares
    compared_pairs: int
    compared_span: int
    # pairs that a program counts and places
    span: int
    # values that a program may reset by itself, and programs beyond which more do not help
    reset_size: int
    most_reset_programs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GDNTuning:
    """Plans of the input projection of a gated delta net."""

    # most rows of a batch whose shrink runs beside the product of all columns: with more of them
    # that product alone fills the device; and where it hides a shrink of few ranks, as
    # `dual_weights` and `dual_ranks` of linear layers say
    dual_rows: int
    dual_rows_of_few_ranks: int


# equal by identity, which is compared for every plan that is looked up; there are few of them
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tuning:
    dense: DenseTuning
    gdn: GDNTuning
    moe: MoETuning
    align: AlignTuning

    @property
    def is_invariant(self) -> bool:
        """Whether all batches take one plan."""
        return self.moe.planned_pairs is not None


# measured on an H200 of 132 multiprocessors with torch 2.11 and triton 3.6, compared_pairs and
# compared_span on an H100 instead; docs/benchmarks.md has the figures
HOPPER = Tuning(
    dense=DenseTuning(
        rows_of_height_16=64,
        rows_of_height_32=128,
        rows_of_height_64=2047,
        prefill_height=128,
        programs=528,
        multiprocessors=132,
        shared_bytes=227 << 10,
        partial_tiles=8,
        deep=8192,
        wide=8192,
        dual_weights=20_000_000,
        dual_rows=64,
        dual_ranks=64,
        dual_more_rows=128,
        dual_most_ranks=256,
        dual_features=1536,
        stored_values=400_000,
        splits_beside=8,
        programs_beside=32,
        most_programs_beside=96,
        usual_slots=4,
    ),
    gdn=GDNTuning(
        dual_rows=96,
        dual_rows_of_few_ranks=255,
    ),
    moe=MoETuning(
        usual_slots=4,
        full=0.75,
        pairs_of_tall_tiles=1024,
        programs=560,
        programs_of_low_rank=300,
        programs_of_decode=256,
        decode_pairs=16,
        most_columns=4096,
        many_tiles=256,
        many_tiles_of_high_rank=128,
        narrow_block_tiles=500,
        deep_pipeline_pairs=2048,
        many_programs=1000,
        part_programs=264,
        small_reads=1 << 17,
        small_in_features=2048,
        dual_pairs=0,
    ),
    align=AlignTuning(
        most_bins=8192,
        most_counters=1 << 27,
        pairs_at_once=256,
        compared_pairs=1024,
        compared_span=4,
        span=128,
        reset_size=1024,
        most_reset_programs=64,
    ),
)

# what the interpreter on a CPU gets, and tensors without data
DEFAULT = HOPPER
# what every other GPU gets until its family has been measured: an A100 has less shared memory
UNMEASURED = replace(HOPPER, dense=replace(HOPPER.dense, shared_bytes=163 << 10))

# between decode and prefill, of which neither gets the plan of the other; not measured
_PLANNED_ROWS = 128
_PLANNED_PAIRS = 1024

# by the major number of the compute capability
FAMILIES: Mapping[int, Tuning] = MappingProxyType({9: HOPPER})


def tuning_of(device: torch.device) -> Tuning:
    """The constants for a device; UNMEASURED for a GPU of a family that has not been measured. With
    LORAKERNELS_BATCH_INVARIANT=1 all batches take one plan."""
    tuning = tuning_of_family(_family(device))
    return with_one_plan(tuning) if batch_invariant() else tuning


def tuning_of_family(family: int | None) -> Tuning:
    """`family` is the major number of the compute capability, None without a GPU."""
    return DEFAULT if family is None else FAMILIES.get(family, UNMEASURED)


@cache
def with_one_plan(tuning: Tuning) -> Tuning:
    """`tuning`, with the plans of one batch size for all of them: heights of tiles, blocks, split-K
    partials and paths. Products of tiles of another height may be other instructions, which add up
    in another order, so none of these may follow from the batch."""
    return replace(
        tuning,
        dense=replace(tuning.dense, planned_rows=_PLANNED_ROWS),
        moe=replace(tuning.moe, planned_pairs=_PLANNED_PAIRS),
    )


@cache
def _family(device: torch.device) -> int | None:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None
