"""Which modules and parameters an adapter targets, by the rules of PEFT for matching names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorakernels.adapters.expressions import Expression


@dataclass(frozen=True, slots=True)
class TargetRule:
    """Which modules of the base model have factors, by the rules of PEFT: a string is a regular
    expression for the whole name, a list holds names or dotted suffixes. `parameters` are names or
    dotted suffixes of bare parameters, such as "experts.down_proj". `file` is where the rule comes
    from, for errors."""

    modules: str | tuple[str, ...]
    exclude: str | tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    file: str = field(default="", compare=False)

    def names_module(self, module: str) -> bool:
        """Raises AdapterError for an expression that takes too long."""
        if self.exclude and self._names("exclude_modules", self.exclude, module):
            return False
        if not self._names("target_modules", self.modules, module):
            return False
        # neither an expression nor a whole name in the list is subject to the choice of layers
        if not self.layers or isinstance(self.modules, str) or module in self.modules:
            return True
        return self._layer_index(module) in self.layers

    def names_parameter(self, parameter: str) -> bool:
        # neither an exclusion nor a choice of layers applies to parameters
        return self._names("target_parameters", self.parameters, parameter)

    def parameters_of(self, module: str) -> tuple[str, ...]:
        """The parameters that the factors of a module, which has some, belong to; none if they
        belong to the module itself."""
        # peft 0.21 replaces projections of experts in `target_modules` by names without a module,
        # which fit the parameters of any module
        if self.names_module(module):
            return ()
        names = sorted({name.rpartition(".")[2] for name in self.parameters})
        return tuple(n for n in names if self.names_parameter(f"{module}.{n}"))

    def _names(self, field: str, rule: str | tuple[str, ...], module: str) -> bool:
        if isinstance(rule, str):
            return Expression(rule, rule, f"{self.file}: {field}").fullmatch(module) is not None
        return any(module == name or module.endswith(f".{name}") for name in rule)

    def _layer_index(self, module: str) -> int | None:
        # the first number in the name is the layer, a later one is an expert
        patterns = [(p, layer_expression(p)) for p in self.layers_pattern]
        for pattern, used_as in patterns or [("", r".*?\.[^.]*\.(\d+)\.")]:
            expression = Expression(pattern, used_as, f"{self.file}: layers_pattern")
            if found := expression.match(module):
                return int(found.group(1))
        return None


def matching_pattern(patterns: Mapping[str, object], module: str, place: str) -> str | None:
    """The first pattern, in the order of the file, that matches the end of a module's name.

    A match begins at the start of the name or after a dot. `place` is the file and the field.
    """
    return next(
        (p for p in patterns if Expression(p, module_expression(p), place).match(module)), None
    )


def module_expression(pattern: str) -> str:
    """The expression for whole names that is equivalent to a pattern for their ends."""
    return rf"(.*\.)?({pattern})$"


def layer_expression(pattern: str) -> str:
    """The expression that finds the number after the name of a list of layers."""
    return rf"(?:^|.*?\.)(?:{pattern})\.(\d+)\."
