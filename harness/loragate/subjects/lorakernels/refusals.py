"""Cases that the project's own layers do not run, each with its reason."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from loragate.matrix.case import Base, Beside, Case, Parallel, Sharding, Site, Streams
from loragate.matrix.engine_case import Model, Speculation
from lorakernels.common.stacked_weights import MAX_RANK
from lorakernels.runtime.tuning import tuning_of


def refusal(device: str, case: Case) -> str | None:
    if case.site is Site.ENGINE:
        return _of_engine(case)
    if case.base is Base.CALLABLE and case.streams is Streams.DUAL:
        return "a layer around a linear that exists runs on one stream"
    if _shared_rank(case) > MAX_RANK:
        return f"rank {case.rank}, cut into {case.tp} equal parts, is rounded up above {MAX_RANK}"
    most = tuning_of(torch.device(device)).dense.stored_values
    if case.beside is Beside.DELTA and _stored_values(case) > most:
        return f"a delta is kept beside the base product up to {most} values"
    return None


def _shared_rank(case: Case) -> int:
    """Ranks of buffers whose A is cut into equal parts: a multiple of these."""
    cuts_a = case.site is Site.MOE_LAYER or case.parallel is Parallel.COLUMN
    parts = case.tp if case.sharding is Sharding.RANK and cuts_a else 1
    return -(-case.rank // parts) * parts


def _stored_values(case: Case) -> int:
    """Of the delta of the largest batch, on one rank."""
    parts = case.tp if case.parallel is Parallel.COLUMN else 1
    return case.max_tokens * sum(-(-width // parts) for width in case.slices)


def _of_engine(case: Case) -> str | None:
    if find_spec("transformers") is None:
        return "transformers is not installed, on whose models the decoder is built"
    if case.streams is Streams.DUAL:
        return "the decoder runs its layers on one stream"
    if case.model is not Model.HYBRID:
        return None
    if case.speculation is not Speculation.NONE:
        return "the state of its delta nets cannot be taken back from a rejected draft"
    from lorakernels.serving.cache import old_transformers

    return old_transformers()
