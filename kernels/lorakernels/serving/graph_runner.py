"""Steps of a model, replayed from CUDA graphs that serve any adapters.

What makes a graph go on being right:

* Its kernels and their grids depend on the number of its rows alone. A step of fewer rows is padded
  with base rows.
* A graph for batches with adapters is captured from a dummy run with adapters in all slots, and the
  kernels of the adapters are in it in any case. They are left out of a graph only where
  `BatchMetadata.without_adapters` declares it, and then only batches of which the host knows that
  they have no adapter are given to it (vllm #43139).
* It begins with the kernel that writes the tables of the mapping from the static `token_slots`,
  whose padding is base rows. So a step is one copy and one replay for the host, which launches no
  kernel by itself.
* All that it reads lies at fixed addresses: inputs, mapping, workspaces, weights, adapters. An
  adapter is loaded in place, so that adapters may come and go between replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from lorakernels.runtime.device import on_device_of
from lorakernels.runtime.graphs import Captured, GraphPool, graph_module
from lorakernels.serving.buffers import ServingBuffers
from lorakernels.serving.dummy import dummy_adapters
from lorakernels.serving.held import held_tensors
from lorakernels.serving.inputs import StepInputs
from lorakernels.serving.keys import GraphKey, choose_key, dummy_slots, plan_keys

# the first call compiles kernels, the second one finds them compiled
_WARM_UPS = 2


class GraphRunner:
    """Runs `step` for batches of any size up to `inputs.max_tokens`.

    step: runs the model on the first `rows` rows of `inputs`, with the mapping of `buffers.batch`,
        and returns [rows, ..]. It never reads the host.
    sizes: the numbers of requests that graphs are captured for, each with and without adapters.
    wide_steps: by their width, steps in which each request has that many rows, one behind the
        other. A request has one row in `step`.
    All calls must be made on one stream, or wait for each other. Raises ValueError.
    """

    def __init__(
        self,
        step: Callable[[int], Tensor],
        inputs: StepInputs,
        buffers: ServingBuffers,
        *,
        sizes: Iterable[int],
        wide_steps: Mapping[int, Callable[[int], Tensor]] | None = None,
    ) -> None:
        if inputs.max_tokens > buffers.max_tokens:
            raise ValueError(
                f"inputs may have {buffers.max_tokens} rows, as was reserved "
                f"(got {inputs.max_tokens})"
            )
        if inputs.block.device != buffers.batch.token_slots.device:
            raise ValueError(
                f"inputs must be on {buffers.batch.token_slots.device} like the buffers "
                f"(got {inputs.block.device})"
            )
        wide_steps = wide_steps or {}
        if wide_steps and min(wide_steps) < 2:
            raise ValueError(f"wide_steps must be from 2 rows on (got {min(wide_steps)})")
        self._steps = {1: step, **wide_steps}
        self._inputs, self._buffers = inputs, buffers
        self._planned = plan_keys(sizes, max_tokens=inputs.max_tokens, widths=self._steps)
        self._device = inputs.block.device
        self._graphs: dict[GraphKey, Captured[Tensor]] = {}
        # by width
        self._sizes: dict[int, list[int]] = {}
        # the tensors that the graphs read, by name: kept, so that their memory stays theirs
        self._captured: dict[str, Tensor] = {}
        self._unchecked: set[GraphKey] = set()
        # of all graphs since they were made
        self.replays = 0

    @property
    def can_capture(self) -> bool:
        """Whether the device has graphs. Without, `capture` captures none, and each step runs
        eagerly."""
        return graph_module(self._device) is not None

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """The graphs that are captured, in the order of their capture."""
        return tuple(self._graphs)

    @torch.no_grad()
    def capture(self) -> tuple[GraphKey, ...]:
        """Capture all graphs from dummy runs, in place of those captured before; the keys.

        Every free slot holds a dummy adapter meanwhile; without a free one the residents serve. No
        step may run meanwhile, and no adapter may be loaded.
        """
        module = graph_module(self._device)
        self._graphs, self._sizes, self._captured = {}, {}, {}
        if module is None:
            return ()
        graphs = {}
        with on_device_of(self._inputs.block), dummy_adapters(self._buffers.slot_weights):
            pool = GraphPool(module, self._device)
            for key in self._planned:
                with self._dummy_step(key):
                    call = partial(self._prepared_step, key)
                    graphs[key] = pool.capture(call, warm_ups=_WARM_UPS)
        self._graphs, self._unchecked = graphs, set(graphs)
        for width in self._steps:
            self._sizes[width] = sorted({key.num_tokens for key in graphs if key.width == width})
        # views: the memory of a parameter may be replaced within the same tensor
        self._captured = {name: t.detach() for name, t in self._read_tensors().items()}
        return self.keys

    def run(self, token_slots: Tensor, *, width: int = 1, **values: Tensor) -> Tensor:
        """The output of the step [live rows, ..].

        token_slots: int32 [live rows] on the CPU; `values`: the other inputs on the CPU, as
            StepInputs.write takes them. All may be overwritten as soon as this returns.
        width: rows of each request, 1 or one of the wide steps.
        A batch that is larger than all graphs runs eagerly. The output of a graph lies in memory of
        the graphs: it is valid until the next call of `run` or `capture`. Raises ValueError, before
        anything is changed where an argument is why.
        """
        batch = self._buffers.batch
        self._check_width(width)
        # asked on the host, before anything is queued
        has_adapters = batch.check(token_slots)
        num_live = token_slots.shape[0]
        if num_live % width:
            raise ValueError(
                f"token_slots must have {width} rows for each request (got {num_live} rows)"
            )
        sizes = self._sizes.get(width, ())
        key = choose_key(sizes, num_rows=num_live, has_adapters=has_adapters, width=width)
        self._inputs.write(token_slots, values)
        if key is None:
            # unlike a copy and a graph, its kernels do not find their device by themselves
            with on_device_of(self._inputs.block), torch.no_grad():
                batch.prepare(token_slots, uploaded=self._inputs.token_slots)
                return self._steps[width](num_live)
        batch.expect(key.num_tokens, num_live, may_have=has_adapters)
        if key in self._unchecked:
            self.check_addresses()
            self._unchecked.remove(key)
        self.replays += 1
        return self._graphs[key].replay()[:num_live]

    def check_addresses(self) -> None:
        """RuntimeError if something that the graphs read was replaced or removed after their
        capture.

        `run` calls it before the first replay of each graph alone, since it takes the longer the
        more layers there are. The graphs keep what they read alive in any case, so that a
        tensor which is replaced later leaves them with its old values, never with other memory.
        """
        found = self._read_tensors()
        for name, captured in self._captured.items():
            now = found.get(name)
            if now is None or now.data_ptr() != captured.data_ptr():
                change = "removed" if now is None else "replaced by another tensor"
                raise RuntimeError(
                    f"{name} was {change} after the graphs had been captured, "
                    "which go on reading the old one: capture them again, or write in place"
                )

    def _check_width(self, width: int) -> None:
        if width not in self._steps:
            allowed = " or ".join(map(str, sorted(self._steps)))
            raise ValueError(f"width must be {allowed} (got {width})")

    @contextmanager
    def _dummy_step(self, key: GraphKey) -> Iterator[None]:
        batch, rows = self._buffers.batch, key.num_tokens
        self._inputs.reset()
        if not key.has_adapters:
            with batch.without_adapters(rows):
                yield
            return
        slots = dummy_slots(rows, batch.max_slots)
        self._inputs.reset(slots)
        batch.expect(rows, rows, may_have=max(slots) >= 0)
        yield

    def _prepared_step(self, key: GraphKey) -> Tensor:
        """What a graph does: the tables of the mapping that the inputs hold, and the step."""
        # a padded row is a live one with -1, so that the graph serves fewer live rows, too
        self._buffers.batch.install(self._inputs.token_slots, key.num_tokens)
        return self._steps[key.width](key.num_tokens)

    def _read_tensors(self) -> dict[str, Tensor]:
        """What the graphs read and write of what this package knows, by name."""
        found: dict[str, Tensor] = {"the block of inputs": self._inputs.block}
        for index, tensor in enumerate(self._buffers.tensors):
            found[f"reserved buffer {index}"] = tensor
        for name, layer in self._buffers.layers.items():
            found |= {f"{part} of {name}": value for part, value in held_tensors(layer).items()}
        for index, weights in enumerate(self._buffers.slot_weights):
            for part, value in weights.tensors._asdict().items():
                found[f"{part} of adapters {index}"] = value
        return found
