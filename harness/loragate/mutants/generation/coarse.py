"""Mutation operators of cosmic-ray, which know Python and nothing of kernels.

They change a parso tree, so a mutant is found as the text that the changed tree gives. Only what is
sampled is made: a swap of binary operators alone has 132 operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from loragate.mutants.generation.text import Module, Span

# they concern other nodes than names and signs, and there are many of them
_FAMILIES = ("ReplaceBinaryOperator", "ReplaceComparisonOperator", "ReplaceUnaryOperator")
_SIGNS = frozenset("()[]{},:.=")
_NOWHERE = frozenset({"newline", "endmarker", "string", "fstring_string"})


@dataclass(frozen=True, slots=True)
class Spot:
    """A place where one operator may change a module; `occurrence` counts within the module."""

    operator: str
    occurrence: int
    span: Span

    @property
    def family(self) -> str:
        """The operator without what it replaces by what."""
        return self.operator.partition("/")[2].partition("_")[0]


def spots(module: Module) -> Iterator[Spot]:
    """Every place, operator by operator. Needs cosmic-ray."""
    from cosmic_ray.ast import ast_nodes, get_ast

    nodes = [node for node in ast_nodes(get_ast(module.text)) if node.type not in _NOWHERE]
    some = [node for node in nodes if node.type != "name" and not _is_sign(node)]
    for name, operator in _operators():
        is_family = name.partition("/")[2].startswith(_FAMILIES)
        places = (
            place
            for node in (some if is_family else nodes)
            for place in operator.mutation_positions(node)
        )
        for occurrence, (start, end) in enumerate(places):
            yield Spot(name, occurrence, (module.offset(*start), module.offset(*end)))


def changed_text(module: Module, spot: Spot) -> str | None:
    """The whole module with the change of `spot`; None if the operator cannot make it."""
    from cosmic_ray.mutating import mutate_code

    operator = dict(_operators())[spot.operator]
    try:
        text: str | None = mutate_code(module.text, operator, spot.occurrence)
    except AttributeError:
        # cosmic-ray 8.7 replaces exceptions by plain names only, and finds dotted ones all the same
        return None
    return text


def _is_sign(node: Any) -> bool:
    return node.type == "operator" and node.value in _SIGNS


@cache
def _operators() -> tuple[tuple[str, Any], ...]:
    """Operators that need no arguments, by name."""
    from cosmic_ray.plugins import get_operator, operator_names

    classes = ((name, get_operator(name)) for name in sorted(operator_names()))
    return tuple((name, found()) for name, found in classes if not found.arguments())
