"""The axes of the site `engine`: a model, and how it is served. Whatever the engine. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

from loragate.core.verdict import OracleName
from loragate.matrix.axis import Axis
from loragate.matrix.axis_values import Site

# judge the answers of an engine; all other oracles judge tensors
ENGINE_ORACLES = frozenset({OracleName.TOKENS, OracleName.ENGINE_PROPERTIES, OracleName.LIVENESS})
_SITES = frozenset({Site.ENGINE})


class Model(StrEnum):
    DENSE = "dense"
    MOE = "moe"
    # with gated delta nets
    HYBRID = "hybrid"


# of an adapter, whatever it changes: two values are rotated, and linear attention has more parts
LEAST_RANKS: Mapping[Model, int] = MappingProxyType({Model.DENSE: 2, Model.MOE: 2, Model.HYBRID: 5})

# that a checkpoint is written with: words of more would not fit on a cycle of the language
MOST_ADAPTERS = 7


class Speculation(StrEnum):
    """Where drafts come from."""

    NONE = "none"
    # the request's own text
    NGRAM = "ngram"
    # a model of its own
    DRAFT_MODEL = "draft_model"
    # a head on the hidden states of the model
    EAGLE = "eagle"
    # layers of the checkpoint that predict further tokens
    MTP = "mtp"


class Graphs(StrEnum):
    """Which steps are replayed from CUDA graphs."""

    NONE = "none"
    # all, cut at attention
    PIECEWISE = "piecewise"
    # all, whole
    FULL = "full"
    # steps without a prompt, whole
    FULL_DECODE = "full_decode"


class Specialize(StrEnum):
    """Whether there are graphs for several numbers of active adapters."""

    OFF = "off"
    ON = "on"


class Active(StrEnum):
    """Which adapters the requests of a batch use, beside the base model."""

    NONE = "none"
    ONE = "one"
    # all but one of those that are resident
    SOME = "some"
    ALL = "all"
    # one more than there are slots
    BEYOND_SLOTS = "beyond_slots"


class PrefixCaching(StrEnum):
    OFF = "off"
    ON = "on"


class Prefill(StrEnum):
    """How a prompt is computed."""

    WHOLE = "whole"
    CHUNKED = "chunked"


class Targets(StrEnum):
    """Which projections an adapter changes."""

    ALL = "all"
    ATTENTION = "attention"
    # of a dense model
    MLP = "mlp"
    EXPERTS = "experts"
    LM_HEAD = "lm_head"


class Weights(StrEnum):
    """What a checkpoint is made of."""

    # each token says which adapter produced it
    LANGUAGE = "language"
    # each token depends on all tokens before it and on their places
    RANDOM = "random"


class Logprobs(StrEnum):
    """Whether requests ask for the probabilities of their tokens, too."""

    OFF = "off"
    ON = "on"


class Requests(StrEnum):
    """How many requests of a batch run at a time."""

    TOGETHER = "together"
    # half of them; others join as these end
    QUEUED = "queued"


class Ends(StrEnum):
    """What ends an answer."""

    # the number of tokens that its request wants
    LIMIT = "limit"
    # tokens that the requests name, too: at the first one, amid the answer, or not at all
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAxes:
    """The part of `Case` that engines have alone."""

    model: Annotated[Model, Axis(sites=_SITES, required_at=_SITES)] = Model.DENSE
    speculation: Annotated[Speculation, Axis(id_name="spec", sites=_SITES)] = Speculation.NONE
    graphs: Annotated[Graphs, Axis(sites=_SITES)] = Graphs.NONE
    specialize: Annotated[Specialize, Axis(sites=_SITES)] = Specialize.OFF
    active: Annotated[Active, Axis(sites=_SITES)] = Active.ALL
    prefix_caching: Annotated[PrefixCaching, Axis(id_name="prefix", sites=_SITES)] = (
        PrefixCaching.OFF
    )
    prefill: Annotated[Prefill, Axis(sites=_SITES)] = Prefill.WHOLE
    targets: Annotated[Targets, Axis(sites=_SITES)] = Targets.ALL
    logprobs: Annotated[Logprobs, Axis(sites=_SITES)] = Logprobs.OFF
    requests: Annotated[Requests, Axis(sites=_SITES)] = Requests.TOGETHER
    ends: Annotated[Ends, Axis(sites=_SITES)] = Ends.LIMIT
    weights: Annotated[Weights, Axis(sites=_SITES)] = Weights.LANGUAGE
