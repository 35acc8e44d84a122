"""The bytes of tensors that are alive at once, and cases most of whose bytes are of one kind."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loragate.matrix.case import Case, Dtype, Parallel, Quantisation, RouterWeights, Site


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made within that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def case_of(site: Site, **axes: Any) -> Case:
    shape = {"tokens": 8, "in_features": 512, "slices": (256, 256), "rank": 64, "slots": 4}
    return Case(site=site, **{"dtype": Dtype.BF16, **shape, **axes})


LARGE = {
    "adapters": case_of(Site.DENSE_DELTA, rank=512, slots=6),
    "rows": case_of(Site.DENSE_DELTA, rank=1, slots=1, tokens=6000),
    "base weights": case_of(Site.LORA_LINEAR, rank=1, slots=1, slices=(4096,)),
    "base weights in fp32": case_of(
        Site.LORA_LINEAR, rank=1, slots=1, slices=(4096,), dtype=Dtype.FP32
    ),
    "rows of a layer": case_of(Site.LORA_LINEAR, rank=1, slots=1, tokens=3000),
    "adapters of experts": case_of(Site.MOE_DELTA, experts=8, top_k=2),
    "experts": case_of(Site.MOE_LAYER, experts=8, top_k=2, rank=8, router=RouterWeights.OUTPUT),
    "a vocabulary": case_of(Site.EMBEDDING, in_features=9000, slices=(256,), slots=2),
}

# most bytes are those of the output
CHOICES = case_of(Site.MOE_DELTA, experts=4, top_k=4, rank=1, slots=1, tokens=500)

# drawn in fp32, so that copies in a wider dtype are alive
QUANTISED = replace(LARGE["experts"], quantisation=Quantisation.FP8)


def cut_case(site: Site, wide: int, slices: tuple[int, ...], **axes: Any) -> Case:
    """Of few rows, for a subject whose kernels the interpreter runs."""
    shape = {"tokens": 2, "rank": 16, "slots": 16}
    return case_of(site, in_features=wide, slices=slices, **{**shape, **axes})


# most bytes are what each of several ranks has whole
CUT = {
    "column": cut_case(Site.LORA_LINEAR, 1024, (64,), parallel=Parallel.COLUMN, tp=8),
    "row": cut_case(Site.LORA_LINEAR, 64, (1024,), parallel=Parallel.ROW, tp=8),
    "rows of sums": cut_case(
        Site.LORA_LINEAR, 64, (128,), parallel=Parallel.ROW, tp=8, tokens=200, rank=1, slots=1
    ),
    "vocabulary": cut_case(Site.EMBEDDING, 64, (2048,), tp=4),
    "experts": cut_case(
        Site.MOE_LAYER, 256, (16, 16), tp=4, experts=2, top_k=2, router=RouterWeights.OUTPUT
    ),
}
