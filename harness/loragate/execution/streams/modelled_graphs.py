"""CUDA graphs for a machine without a GPU: what a capture freezes, done again by each replay.

Within a capture the launches of Triton's interpreter and the operators of torch run once, and are
kept as a graph keeps them: with their grid, their numbers and the addresses of their tensors. A
replay does nothing else; no code of the host runs. So a launch that the capture left out stays out,
and whatever the host would compute anew for each step is that of the capture.

Before a replay, memory that nothing but graphs hold contains poison: what is allocated within a
capture and let go belongs to a pool that other graphs use as well, and what was allocated outside
and let go since has been given to somebody else.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from loragate.execution.streams.assigned import assigned_number, noticed_numbers
from loragate.execution.streams.operators import (
    Again,
    backend_of,
    host_waits,
    is_written_in_python,
    used_by,
)

# NaN for floats, and -1, which reaches no memory far away where it is used as an index
_POISON = 0xFF


@dataclass(slots=True)
class _Recording:
    """What a graph does. `held`: by how many tensors it holds each storage, by its address."""

    actions: list[Callable[[], object]] = field(default_factory=list)
    held: Counter[int] = field(default_factory=Counter)
    storages: dict[int, Tensor] = field(default_factory=dict)

    def own(self, tensor: Tensor) -> Tensor:
        """The same memory behind a tensor that nobody else has. An action must keep it."""
        self.remember(tensor)
        self.held[_key(tensor)] += 1
        return tensor.detach()

    def remember(self, tensor: Tensor) -> None:
        """The graph uses the memory of a tensor, and holds it."""
        key = _key(tensor)
        if key not in self.storages:
            self.storages[key] = tensor.detach()
            self.held[key] += 1

    def let_go(self, graphs: Collection[_Recording]) -> list[Tensor]:
        """Memory that nothing but graphs hold."""
        return [
            tensor
            for key, tensor in self.storages.items()
            if _holders(tensor) == sum(graph.held[key] for graph in graphs)
        ]


class ModelledGraphs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The observer of modelled streams (see model.py) that captures and replays graphs. What only
    reads and writes tensors `on_host` is done in the capture, and is no part of its graph."""

    def __init__(self, on_host: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # kept, so that no other tensor gets their memory
        self._on_host = {_key(tensor): tensor for tensor in on_host}
        self._graphs: dict[int, _Recording] = {}
        self._recording: _Recording | None = None
        self._captures = ExitStack()
        self._muted = False

    @property
    def graphs(self) -> ModelledGraphs:
        return self

    # what streams and events are asked to do: a replay keeps the order of the host

    def record(self, event: int, stream: int) -> None:
        pass

    def wait(self, event: int, stream: int) -> None:
        pass

    def keep(self, tensor: Tensor, stream: int) -> None:
        pass

    def sync(self, *, stream: int | None = None, event: int | None = None) -> None:
        if self._recording is not None:
            raise _not_permitted("the host waits for the device")

    # what graphs are asked to do

    def begin_capture(self, graph: int) -> None:
        self._recording = self._graphs[graph] = _Recording()
        self._captures.enter_context(self)
        self._captures.enter_context(noticed_numbers())
        if "triton" in sys.modules:
            self._captures.enter_context(self._frozen_launches())

    def end_capture(self, graph: int) -> None:
        self._captures.close()
        self._recording = None

    def launch(self, graph: int) -> None:
        recording = self._graphs[graph]
        for tensor in recording.let_go(self._graphs.values()):
            _fill(tensor)
        for action in recording.actions:
            action()

    # what a capture keeps

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, recording = kwargs or {}, self._recording
        if self._muted or recording is None:
            return func(*args, **kwargs)
        if func.namespace not in ("aten", "prim", "prims"):
            before = len(recording.actions)
            with self:
                result = func.redispatch(backend_of(args, kwargs), *args, **kwargs)
            if len(recording.actions) > before or is_written_in_python(func):
                return result
        else:
            result = func(*args, **kwargs)
        self._keep(recording, func, args, kwargs, result)
        return result

    def _keep(
        self,
        recording: _Recording,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        name = str(func.overloadpacket.__name__)
        if name == "lift_fresh" and assigned_number(func, args) is not None:
            return
        used = list(used_by(func, args, kwargs))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if used and all(_key(tensor) in self._on_host for tensor, _, _ in used):
            return
        if host_waits(func, args, kwargs, [*(tensor for tensor, _, _ in used), *outputs]):
            way_out = "tensors that a GPU does not hold are named by Capabilities.host_tensors"
            raise _not_permitted(f"the host waits for the device in {name}; {way_out}")
        known = {_key(tensor) for tensor, _, _ in used}
        fresh = [tensor for tensor in outputs if _key(tensor) not in known]
        for tensor in fresh:
            recording.remember(tensor)
        writes = fresh or not outputs or any(is_write for _, is_write, _ in used)
        if writes and not name.startswith(("empty", "new_empty")):
            recording.actions.append(self._again(recording, func, args, kwargs, outputs))

    def _again(
        self,
        recording: _Recording,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[Tensor],
    ) -> Again:
        # a graph has a number itself, and not the memory that it was in
        number = assigned_number(func, args)
        args, kwargs = self._owned(recording, (args, kwargs), but=number)
        known = {_key(tensor) for tensor, _, _ in used_by(func, args, kwargs)}
        results = [recording.own(tensor) for tensor in outputs]
        fresh = [tensor for tensor in results if _key(tensor) not in known]
        return Again(func, args, kwargs, results, fresh)

    def _owned(self, recording: _Recording, arguments: Any, *, but: Tensor | None = None) -> Any:
        return tree_map(
            lambda leaf: (
                recording.own(leaf) if isinstance(leaf, Tensor) and leaf is not but else leaf
            ),
            arguments,
        )

    @contextmanager
    def _frozen_launches(self) -> Iterator[None]:
        """Within, launches in the interpreter are kept with the grid that they have."""
        from triton.runtime.interpreter import GridExecutor

        run = GridExecutor.__call__

        def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
            recording = self._recording
            if self._muted or recording is None:
                run(executor, *args, **kwargs)
                return
            with self._muting():
                args, kwargs = self._owned(recording, (args, kwargs))
                _freeze_grid(executor)
                run(executor, *args, **kwargs)
            recording.actions.append(lambda: run(executor, *args, **kwargs))

        with patch.object(GridExecutor, "__call__", launched):
            yield

    @contextmanager
    def _muting(self) -> Iterator[None]:
        self._muted = True
        try:
            yield
        finally:
            self._muted = False


def _freeze_grid(executor: Any) -> None:
    """The first grid of a launch is the grid of all."""
    grid = executor.grid
    if callable(grid):
        frozen: list[Any] = []

        def first(meta: Any) -> Any:
            if not frozen:
                frozen.append(grid(meta))
            return frozen[0]

        executor.grid = first


def _not_permitted(what: str) -> RuntimeError:
    return RuntimeError(f"operation not permitted when stream is capturing: {what}")


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _holders(tensor: Tensor) -> int:
    """How many tensors have the memory of this one."""
    storage = tensor.untyped_storage()
    # this object is one more holder
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def _fill(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    if storage.nbytes():
        view = torch.empty(0, dtype=torch.uint8, device=storage.device)
        view.set_(storage, 0, (storage.nbytes(),), (1,)).fill_(_POISON)
