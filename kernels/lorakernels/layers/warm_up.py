"""The kernels that linear layers need for any batch, listed and compiled before a server starts.

A kernel is compiled anew for each height of its tiles, each size of its blocks and each number of
parts that K is split into. All of these follow from the number of rows. So a server that compiles
on demand stops for a second or more at sizes that it meets for the first time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata, tile_height
from lorakernels.common.sizes import remembered
from lorakernels.dense.embedding import ID_TYPES, shape_of_lookup
from lorakernels.dense.expand_plan import plan_expand
from lorakernels.dense.forms import plan_form
from lorakernels.dense.ops import DenseWorkspace, shape_of_batch
from lorakernels.dense.plan import plan_shrink
from lorakernels.dense.rank_shards import RankShardedSlots
from lorakernels.dense.shape import DenseShape
from lorakernels.dense.weights import SlotWeights
from lorakernels.gdn.forms import plan_gdn
from lorakernels.layers.embedding import LoRAEmbedding
from lorakernels.layers.gdn import GatedDeltaNetInputProjection
from lorakernels.layers.linear import LinearAdapters
from lorakernels.runtime import interpreter
from lorakernels.runtime.device import on_device_of
from lorakernels.runtime.launching import Launch, noted_launches
from lorakernels.runtime.options import dual_stream

LinearLayer = LinearAdapters | GatedDeltaNetInputProjection


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """A kernel as it is compiled. `rows` is the smallest batch that needs it, `constants` are the
    values that it is compiled for, with the dtypes of its tensors."""

    kernel: str
    rows: int
    constants: tuple[tuple[str, str], ...]


def warm_up(
    layers: Sequence[LinearLayer], metadata: BatchMetadata, workspace: DenseWorkspace
) -> tuple[KernelVariant, ...]:
    """Compile all of `kernel_variants`, several at a time, and wait for them. Batches that are
    described there compile nothing afterwards. In the interpreter nothing is compiled."""
    found = _found(layers, metadata, workspace)
    if not interpreter.is_on():
        from triton import AsyncCompileMode

        with (
            on_device_of(metadata.token_slots),
            ThreadPoolExecutor() as pool,
            AsyncCompileMode(pool),
        ):
            for launch in found.values():
                launch.compile()
    return tuple(found)


def kernel_variants(
    layers: Sequence[LinearLayer], metadata: BatchMetadata, workspace: DenseWorkspace
) -> tuple[KernelVariant, ...]:
    """The kernels that steps of any size up to `metadata.max_tokens` launch for the adapters of
    these layers, each once, by the smallest batch that needs it. Where the tiles of `metadata` have
    one height, steps of that height alone.

    Of contiguous inputs whose addresses are multiples of 16, and of the forms that the plans take,
    with a second stream if the process says so. `metadata` and `workspace` are those that the
    server uses; no step may be prepared meanwhile, and the next one must be. Layers are run on rows
    that hold anything. Their base products run, and so does the preparation of each step, which
    compiles its own kernel.
    """
    return tuple(_found(layers, metadata, workspace))


def planned_sizes(
    slots: SlotWeights, max_rows: int, *, widths: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """For each way in which the adapters of a layer are launched, the smallest batch for which they
    are, ascending, at most `max_rows`. widths: of the slices, where another rank holds them."""
    shape = shape_of_batch(0, slots)
    if widths is not None:
        shape = replace(shape, slice_widths=widths)
    # where A is sharded by rank, B has more ranks
    return _sizes_of(shape, slots.b.shape[-1], max_rows, dual_stream(slots.a.device))


# most layers of a model have the shape of another one
@remembered
def _sizes_of(shape: DenseShape, expanded: int, max_rows: int, is_dual: bool) -> tuple[int, ...]:
    """`expanded`: the ranks of a slice that the expand reads."""
    first: dict[Hashable, int] = {}
    for rows in range(1, max_rows + 1):
        shape = replace(shape, num_rows=rows)
        beside, whole = replace(shape, beside=True), replace(shape, rank=expanded)
        # a delta net whose products may not be joined has one form for all batches
        forms = (plan_form(shape, dual_stream=is_dual), plan_gdn(shape, dual_stream=is_dual))
        plans = (shape.height, plan_shrink(shape), plan_shrink(beside), plan_expand(whole), forms)
        first.setdefault(plans, rows)
    return tuple(sorted(first.values()))


def _found(
    layers: Sequence[LinearLayer], metadata: BatchMetadata, workspace: DenseWorkspace
) -> dict[KernelVariant, Launch]:
    """Each variant with a launch of it. All layers run: a list of what two of them must have in
    common would have to name all that launches depend on, and what a base returns is not known
    before it runs."""
    found: dict[tuple[str, Hashable], tuple[KernelVariant, Launch]] = {}
    for layer in layers:
        if not isinstance(layer, LinearLayer):
            raise ValueError(
                "layers must be linear layers, embeddings or input projections of delta nets "
                f"(got a {type(layer).__name__})"
            )
        for rows, launch in _launches(layer, metadata, workspace):
            constants = constants_of(launch)
            variant = KernelVariant(launch.name, rows, constants)
            key = (launch.name, constants)
            if key not in found or rows < found[key][0].rows:
                found[key] = variant, launch
    return dict(found.values())


def _launches(
    layer: LinearLayer, metadata: BatchMetadata, workspace: DenseWorkspace
) -> Iterator[tuple[int, Launch]]:
    most = metadata.max_tokens
    inputs, sizes = _inputs_of(layer, most), _sizes_to_run(layer, most)
    mapping = torch.zeros(most, dtype=torch.int32, device=layer.slots.a.device)
    for rows in sizes:
        if metadata.height_of(rows) != tile_height(rows, metadata.tuning):
            # no step has so many rows where the tiles of all steps have one height
            continue
        metadata.prepare(mapping[:rows])
        for x in inputs:
            with noted_launches() as launches:
                layer(x[:rows], metadata, workspace)
            yield from ((rows, launch) for launch in launches)


def _inputs_of(layer: LinearLayer, max_rows: int) -> tuple[Tensor, ...]:
    """Rows of each type that the layer takes; no kernel of adapters reads them."""
    slots = layer.slots
    if isinstance(layer, LoRAEmbedding):
        return tuple(
            torch.zeros(max_rows, dtype=dtype, device=slots.a.device) for dtype in ID_TYPES
        )
    return (slots.a.new_empty(max_rows, slots.in_features),)


def _sizes_to_run(layer: LinearLayer, max_rows: int) -> tuple[int, ...]:
    slots = layer.slots
    if isinstance(layer, LoRAEmbedding):
        return _sizes_of_lookups(slots, max_rows)
    if not isinstance(slots, RankShardedSlots) or slots.parts > 1:
        return planned_sizes(slots, max_rows)
    # each run is an exchange, so that all ranks run the same sizes; where the columns of a layer
    # cannot be divided evenly, some ranks have one more
    assert isinstance(layer, LinearAdapters)
    assert layer.collective is not None
    columns, ranks = layer.packing.out_features, layer.collective.size
    if ranks == 1:
        # no other rank has other columns, and this one may have several slices and padded ones
        return planned_sizes(slots, max_rows)
    held = {columns // ranks, -(-columns // ranks)}
    sizes = (planned_sizes(slots, max_rows, widths=(width,)) for width in held)
    return tuple(sorted(set().union(*sizes)))


def _sizes_of_lookups(slots: SlotWeights, max_rows: int) -> tuple[int, ...]:
    first: dict[Hashable, int] = {}
    for rows in range(1, max_rows + 1):
        shape = shape_of_lookup(rows, slots.a, slots.out_features)
        first.setdefault((shape.height, plan_expand(shape)), rows)
    return tuple(sorted(first.values()))


def constants_of(launch: Launch) -> tuple[tuple[str, str], ...]:
    """What Triton compiles the kernel of a launch for."""
    args = zip(launch.kernel.arg_names, launch.args, strict=False)
    given = [(name, _kind(value)) for name, value in args]
    return (*given, *((name, repr(value)) for name, value in launch.options.items()))


def _kind(value: object) -> str:
    """Of an argument that is no constant: Triton looks at these of its properties."""
    if isinstance(value, Tensor):
        return f"{value.dtype}, {'' if value.data_ptr() % 16 == 0 else 'not '}aligned"
    assert isinstance(value, int), f"a launch has tensors and integers (got {value!r})"
    if value == 1:
        return "1"
    width = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return f"{width} multiple of 16" if value % 16 == 0 else width
