"""What must hold of any engine with adapters, without a reference.

Texts are compared, so that a model whose best two tokens are close may differ without a defect: use
checkpoints with wide margins. An engine that cannot say a count leaves the property undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from loragate.core.sequential import Decision
from loragate.engine.requests import Completion, Engine, EngineCounts, Request

_RELOAD = "a reload serves the new weights"

Generate = Callable[[Sequence[Request]], Sequence[Completion]]


@dataclass(frozen=True, slots=True)
class Property:
    """detail: the first thing that is wrong, or what cannot be said; empty if nothing is."""

    name: str
    decision: Decision
    detail: str = ""

    @classmethod
    def of(cls, name: str, problems: Sequence[str]) -> Property:
        return cls(name, Decision.FAIL if problems else Decision.PASS, "".join(problems[:1]))


def adapters_differ_from_base(generate: Generate, requests: Sequence[Request]) -> Property:
    """Each request with an adapter has another answer than the same one without."""
    adapted = [request for request in requests if request.adapter is not None]
    own = _served(generate, adapted)
    base = _served(generate, [replace(request, adapter=None) for request in adapted])
    problems = [
        f"request {n} has the answer of the base model with {request.adapter}"
        for n, (request, a, b) in enumerate(zip(adapted, own, base, strict=True))
        if a == b
    ]
    return Property.of("adapters differ from base", problems)


def a_permuted_batch_permutes(
    generate: Generate, requests: Sequence[Request], order: Sequence[int]
) -> Property:
    """order: which request stands at each place of the second batch. ValueError."""
    if sorted(order) != list(range(len(requests))):
        raise ValueError(f"order must be a permutation of {len(requests)} (got {list(order)})")
    first = _served(generate, requests)
    second = _served(generate, [requests[n] for n in order])
    problems = [
        f"request {n} has another answer at place {place} of a permuted batch"
        for place, n in enumerate(order)
        if second[place] != first[n]
    ]
    return Property.of("a permuted batch permutes", problems)


def alone_equals_mixed(generate: Generate, requests: Sequence[Request]) -> Property:
    mixed = _served(generate, requests)
    problems = [
        f"request {n} has another answer alone than in the batch"
        for n, request in enumerate(requests)
        if _served(generate, [request])[0] != mixed[n]
    ]
    return Property.of("a request alone equals itself in the batch", problems)


def reload_serves_the_new_weights(
    engine: Engine, name: str, folders: tuple[Path, Path], requests: Sequence[Request]
) -> Property:
    """The adapter `name` is loaded from the first folder, then from the second one; the same
    prompts are served before and after, so that their cached prefixes could be. `name` must be
    free, and so must NAME-fresh, under which the second folder is loaded to compare. The adapters
    of `requests` are replaced."""
    fresh = f"{name}-fresh"
    own = [replace(request, adapter=name) for request in requests]
    engine.load(name, folders[0])
    before = _served(engine.generate, own)
    engine.load(name, folders[1])
    after = _served(engine.generate, own)
    engine.load(fresh, folders[1])
    wanted = _served(engine.generate, [replace(request, adapter=fresh) for request in requests])
    for used in (name, fresh):
        engine.unload(used)
    if before == wanted:
        return Property(_RELOAD, Decision.UNDECIDED, "both folders give the same answers")
    problems = [
        f"request {n} has {_kind(answer == old)} after a reload"
        for n, (answer, old, new) in enumerate(zip(after, before, wanted, strict=True))
        if answer != new
    ]
    return Property.of(_RELOAD, problems)


def _kind(is_old: bool) -> str:
    return "the answer of the old weights" if is_old else "the answer of neither weights"


def liveness(counts: EngineCounts, *, wanted: Sequence[str]) -> Property:
    """Each of the fields `wanted` of EngineCounts is above 0. ValueError for other names."""
    known = [field.name for field in fields(EngineCounts)]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"there is no count {unknown[0]!r}; known are {', '.join(known)}")
    values = {name: getattr(counts, name) for name in wanted}
    name = "what is checked took part"
    if idle := [field for field, value in values.items() if value == 0]:
        return Property(name, Decision.FAIL, f"{idle[0]} is 0")
    if untold := [field for field, value in values.items() if value is None]:
        return Property(name, Decision.UNDECIDED, f"the engine does not say {untold[0]}")
    return Property(name, Decision.PASS)


def _served(generate: Generate, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    served = [completion.tokens for completion in generate(requests)]
    if len(served) != len(requests):
        raise ValueError(f"completions must be {len(requests)} (got {len(served)})")
    return served
