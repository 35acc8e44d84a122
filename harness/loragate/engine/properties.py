"""What must hold of the answers of any engine with adapters, without a reference. Pure.

Texts are compared, so that a model whose best two tokens are close may differ without a defect: use
checkpoints with wide margins. What the answers cannot show is left undecided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loragate.core.sequential import Decision
from loragate.engine.requests import Completion

DIFFERS = "adapters differ from base"
PERMUTES = "a permuted batch permutes"
ALONE = "a request alone equals itself in the batch"
RELOAD = "a reload serves the new weights"
LIVENESS = "what is checked took part"


@dataclass(frozen=True, slots=True)
class Property:
    """details: all that is wrong, or what cannot be said; what was not looked at where it passes,
    empty if there is nothing."""

    name: str
    decision: Decision
    details: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, problems: Iterable[str]) -> Property:
        found = tuple(problems)
        return cls(name, Decision.FAIL if found else Decision.PASS, found)


def adapters_differ_from_base(base: Completion, adapted: Mapping[str, Completion]) -> Property:
    """`adapted`: what each adapter answers to the prompt that the base model answers by `base`.
    Later words may be the same by chance, the first ones of these checkpoints are not."""
    return Property.of(
        DIFFERS,
        (
            f"{name} answers as the base model: {_text(answer)}"
            for name, answer in adapted.items()
            if answer.tokens[:1] == base.tokens[:1]
        ),
    )


def a_permuted_batch_permutes(
    mixed: Sequence[Completion], permuted: Sequence[Completion]
) -> Property:
    """`permuted`: the answers to the same requests in another order, put back in theirs."""
    return Property.of(
        PERMUTES,
        (
            f"request {number} is answered {_text(there)} in another place of the same batch "
            f"(before: {_text(here)})"
            for number, (here, there) in enumerate(zip(mixed, permuted, strict=True))
            if here != there
        ),
    )


def alone_equals_mixed(number: int, mixed: Completion, alone: Completion) -> Property:
    """Of request `number` of a batch."""
    message = f"request {number} is answered {_text(alone)} alone and {_text(mixed)} in a batch"
    return Property.of(ALONE, [message] if alone != mixed else [])


def reload_serves_the_new_weights(
    name: str,
    other: str,
    *,
    before: Completion,
    after: Completion,
    wanted: Completion,
    defects: Iterable[str] = (),
) -> Property:
    """Of one prompt: what adapter `name` answers with its own weights and, loaded again with those
    of `other`, afterwards; and what `other` answers. Weights that answer the same would be right if
    the old ones were kept. defects: what a reference says of these two answers, which may both be
    wrong alike."""
    if after != wanted:
        still = "as before, " if after == before else ""
        message = (
            f"{name} with the weights of {other} answers {still}{_text(after)}, "
            f"{other} itself {_text(wanted)}"
        )
        return Property(RELOAD, Decision.FAIL, (message,))
    if told := tuple(defects):
        lines = (f"after {name} was loaded with the weights of {other}: {line}" for line in told)
        return Property(RELOAD, Decision.FAIL, tuple(lines))
    if wanted == before:
        message = f"{name} and {other} answer the same, so that an exchange of their weights shows"
        return Property(RELOAD, Decision.UNDECIDED, (f"{message} nothing",))
    return Property(RELOAD, Decision.PASS)


def liveness(wanted: Mapping[str, int | None]) -> Property:
    """Each of these counts, by what it is of, is above 0. None is what the engine does not count:
    the others decide, and it decides nothing where there are none."""
    if idle := [what for what, count in wanted.items() if count == 0]:
        message = f"none of these in a case that asks for them: {', '.join(idle)}"
        return Property(LIVENESS, Decision.FAIL, (message,))
    unknown = [what for what, count in wanted.items() if count is None]
    details = (f"the engine does not count {', '.join(unknown)}",) if unknown else ()
    known = len(wanted) > len(unknown)
    return Property(LIVENESS, Decision.PASS if known else Decision.UNDECIDED, details)


def _text(answer: Completion) -> str:
    return " ".join(map(str, answer.tokens)) or "nothing"
