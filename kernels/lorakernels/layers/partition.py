"""How one dimension of a linear layer is cut over tensor-parallel ranks. Pure; no torch.

Invariant: over all ranks of a group the live ranges cover each index of the dimension equally
often: once, or `replicas` times where heads are fewer than ranks (sglang #24420).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lorakernels.common.choices import check_choice


class Parallel(StrEnum):
    """Which dimension of the base weight is cut: none, the output or the input."""

    REPLICATED = "replicated"
    COLUMN = "column"
    ROW = "row"


class LoRASharding(StrEnum):
    """What each rank of a tensor-parallel layer holds of its adapters."""

    # what its part of the base weight needs: one factor is cut, the other one is whole
    BASE = "base"
    # the other factor is cut as well, A by its ranks or B by its columns: half the memory, and an
    # exchange of the shrink output
    RANK = "rank"


@dataclass(frozen=True, slots=True)
class Slice:
    """One packed part of a layer's output, such as k_proj of a qkv layer.

    `width` counts the columns of the unpadded model. `heads` makes heads indivisible: with more
    ranks than heads, each head is held by several ranks. `padded_width` is for a base layer
    whose shards are cut from a padded width; adapters are not padded.
    """

    name: str
    width: int
    heads: int | None = None
    padded_width: int | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """The range [start, stop) of the whole dimension that a rank holds, at the beginning of
    `size` local elements; the rest of them is padding."""

    start: int
    stop: int
    size: int

    @property
    def live(self) -> int:
        return self.stop - self.start


def whole(width: int) -> Shard:
    """What each rank holds of a dimension that is not cut."""
    return Shard(0, width, width)


def cut_dimension(name: str, width: int, tp_size: int, tp_rank: int, padded: int) -> Shard:
    """An equal part of `padded` elements, of which the first `width` exist. ValueError."""
    if padded < width:
        raise ValueError(f"padded width of {name} must be at least {width} (got {padded})")
    if padded % tp_size:
        raise ValueError(f"{name} must be divisible by tp_size {tp_size} (got {padded})")
    # the stride follows the padded size, the end the real one: a rank may hold only padding
    size = padded // tp_size
    start = min(tp_rank * size, width)
    return Shard(start, min(start + size, width), size)


def cut_slice(part: Slice, tp_size: int, tp_rank: int) -> Shard:
    """The columns of a slice that a rank of a column-parallel layer holds. ValueError."""
    if part.heads is None:
        padded = part.width if part.padded_width is None else part.padded_width
        return cut_dimension(f"slice {part.name}", part.width, tp_size, tp_rank, padded)
    if part.padded_width is not None:
        raise ValueError(f"slice {part.name} may have heads or padded_width (got both)")
    if part.heads < 1 or part.width % part.heads:
        raise ValueError(
            f"heads of slice {part.name} must divide its width {part.width} (got {part.heads})"
        )
    if part.heads % tp_size and tp_size % part.heads:
        raise ValueError(
            f"heads of slice {part.name} must be a multiple or a divisor of tp_size {tp_size} "
            f"(got {part.heads})"
        )
    size = part.width // min(part.heads, tp_size)
    start = tp_rank // replicas(part, tp_size) * size
    return Shard(start, start + size, size)


def replicas(part: Slice, tp_size: int) -> int:
    """How many ranks of a column-parallel layer hold each column of a slice."""
    return 1 if part.heads is None else max(1, tp_size // part.heads)


@dataclass(frozen=True, slots=True)
class LayerCut:
    """A rank's part of a layer: its columns of each slice, its inputs, and whether it adds the
    bias (the sum over a row-parallel group must hold it once)."""

    columns: tuple[Shard, ...]
    inputs: Shard
    owns_bias: bool


def cut_layer(
    slices: Sequence[Slice],
    in_features: int,
    *,
    parallel: Parallel = Parallel.REPLICATED,
    tp_size: int = 1,
    tp_rank: int = 0,
    padded_in_features: int | None = None,
    input_name: str = "in_features",
) -> LayerCut:
    """`padded_in_features` is for row-parallel layers whose input is cut from a padded width.
    `input_name`: what errors call the input.

    Raises ValueError.
    """
    check_choice("parallel", parallel, Parallel)
    if tp_size < 1:
        raise ValueError(f"tp_size must be at least 1 (got {tp_size})")
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank must be 0 to {tp_size - 1} (got {tp_rank})")
    if padded_in_features is not None and parallel is not Parallel.ROW:
        raise ValueError(
            f"padded_in_features must be None for a {parallel} layer (got {padded_in_features})"
        )
    columns = tuple(whole(part.width) for part in slices)
    if parallel is Parallel.COLUMN:
        # each slice separately: cutting the packed width would mix q, k and v
        # (tensorrt-llm #8063)
        columns = tuple(cut_slice(part, tp_size, tp_rank) for part in slices)
    inputs = whole(in_features)
    if parallel is Parallel.ROW:
        padded = in_features if padded_in_features is None else padded_in_features
        inputs = cut_dimension(input_name, in_features, tp_size, tp_rank, padded)
    return LayerCut(columns, inputs, parallel is not Parallel.ROW or tp_rank == 0)


@dataclass(frozen=True, slots=True)
class RankCut:
    """A rank's part of the adapters of a layer that is sharded by rank: `held` of the ranks of A,
    of `rank` in the buffers; its columns of B, for each slice; and where these begin in the output
    of the base."""

    held: range
    rank: int
    columns: tuple[Shard, ...]
    first_column: int


def cut_rank(
    slices: Sequence[Slice],
    cut: LayerCut,
    rank: int,
    *,
    parallel: Parallel,
    tp_size: int,
    tp_rank: int,
) -> RankCut:
    """How adapters of up to `rank` ranks are cut where `cut` is that of the base.

    By columns: the rank of the buffers is rounded up to a multiple of tp_size and cut evenly,
    whatever the rank of an adapter. By rows: the columns of the one slice are, as evenly as they
    can be. Raises ValueError.
    """
    if parallel is Parallel.REPLICATED:
        raise ValueError(
            f"a layer sharded by rank must be column- or row-parallel (got {parallel})"
        )
    if parallel is Parallel.ROW:
        return _cut_columns(slices, rank, tp_size, tp_rank)
    size = -(-rank // tp_size)
    held = range(tp_rank * size, (tp_rank + 1) * size)
    return RankCut(held, size * tp_size, cut.columns, first_column=0)


def _cut_columns(slices: Sequence[Slice], rank: int, tp_size: int, tp_rank: int) -> RankCut:
    # columns of several slices would lie apart in the output
    if len(slices) != 1:
        raise ValueError(
            f"a row-parallel layer sharded by rank must have one slice (got {len(slices)})"
        )
    width = slices[0].width
    if width < tp_size:
        raise ValueError(
            f"slice {slices[0].name} must have {tp_size} columns or more (got {width})"
        )
    start, stop = (width * place // tp_size for place in (tp_rank, tp_rank + 1))
    return RankCut(range(rank), rank, (Shard(start, stop, stop - start),), first_column=start)
