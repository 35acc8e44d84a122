"""Which modules and parameters an adapter targets, by the rules of PEFT for matching names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetRule:
    """Which modules of the base model have factors, by the rules of PEFT: a string is a regular
    expression for the whole name, a list holds names or dotted suffixes. `parameters` are names or
    dotted suffixes of bare parameters, such as "experts.down_proj"."""

    modules: str | tuple[str, ...]
    exclude: str | tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    def matches(self, module: str) -> bool:
        # neither an exclusion nor a choice of layers applies to parameters
        if self.names_parameter(module):
            return True
        if self.exclude and _names(self.exclude, module):
            return False
        if not _names(self.modules, module):
            return False
        # a whole name in the list is not subject to the choice of layers
        if not self.layers or module in self.modules:
            return True
        return self._layer_index(module) in self.layers

    def names_parameter(self, parameter: str) -> bool:
        return _names(self.parameters, parameter)

    def parameters_of(self, module: str) -> tuple[str, ...]:
        """The parameters of a module that carry factors."""
        names = sorted({name.rpartition(".")[2] for name in self.parameters})
        return tuple(n for n in names if self.names_parameter(f"{module}.{n}"))

    def _layer_index(self, module: str) -> int | None:
        # the first number in the name is the layer, a later one is an expert
        patterns = [layer_expression(p) for p in self.layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*\.(\d+)\."]:
            if found := re.match(pattern, module):
                return int(found.group(1))
        return None


def matching_pattern(patterns: Mapping[str, object], module: str) -> str | None:
    """The first pattern, in the order of the file, that matches the end of a module's name.

    A match begins at the start of the name or after a dot.
    """
    return next((p for p in patterns if re.match(module_expression(p), module)), None)


def module_expression(pattern: str) -> str:
    """The expression for whole names that is equivalent to a pattern for their ends."""
    return rf"(.*\.)?({pattern})$"


def layer_expression(pattern: str) -> str:
    """The expression that finds the number after the name of a list of layers."""
    return rf"(?:^|.*?\.)(?:{pattern})\.(\d+)\."


def _names(rule: str | tuple[str, ...], module: str) -> bool:
    if isinstance(rule, str):
        return re.fullmatch(rule, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in rule)
