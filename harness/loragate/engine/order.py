"""What an engine's process is asked to start, and what it answers. Pickled between processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loragate.matrix.case import Case


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """`case` says how the model is served. `model` and `drafts` are folders, the latter of the
    model or the EAGLE-3 head that drafts, where the case has one; layers that draft are in that of
    the model. A request has at most `max_length` tokens with its answer. At most `max_requests` run
    at a time, and a prompt pass may take them all at once; more are asked for at once in a case of
    queued requests. `device`: "cuda" or "cpu"."""

    case: Case
    model: Path
    drafts: Path | None
    device: str
    max_length: int
    max_requests: int
    num_adapters: int


@dataclass(frozen=True, slots=True)
class Start:
    """`methods` are those that whatever is started must have."""

    order: EngineOrder
    methods: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A method of an engine and its arguments."""

    method: str
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine returned; or what it raised, or how it broke the protocol, as text."""

    value: object
    error: str | None = None
    breach: str | None = None
