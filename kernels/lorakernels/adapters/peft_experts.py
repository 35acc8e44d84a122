"""Factors of stacked experts: from the tensors of a PEFT file to factors with an axis of experts.

PEFT flattens the axis of experts: it is the slowest axis in lora_A [experts * r, in] and the
fastest in lora_B [out, r * experts] (vllm #31534). PEFT names such factors after the module that
holds the parameters, with one more wrapper in the name for each further parameter, and its releases
do not agree on which dimension of a parameter is the input.

A pair is lora_A and lora_B of one module. Invariant: which parameter a pair belongs to, and which
of its dimensions is the input, follows from the sizes of both projections alone; ambiguous sizes
are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path

from torch import Tensor

from lorakernels.adapters.errors import AdapterError, printable
from lorakernels.adapters.peft_config import PeftConfig
from lorakernels.adapters.peft_targets import TargetRule

Pair = tuple[Tensor, Tensor]
_WRAPPED = ".base_layer"
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


def name_parameters(
    path: Path, config: PeftConfig, pairs: Mapping[str, Pair]
) -> tuple[dict[str, Pair], dict[str, Pair]]:
    """The pairs of modules, and the pairs of parameters under "<module>.<parameter>", as a
    [experts, r, in] and b [experts, out, r]. Raises AdapterError."""
    modules: dict[str, Pair] = {}
    wrapped: dict[str, dict[str, Pair]] = {}
    for module, pair in pairs.items():
        holder = module
        while holder.endswith(_WRAPPED):
            holder = holder.removesuffix(_WRAPPED)
        if config.targets.parameters_of(holder):
            if pair[0].dim() != 2 or pair[1].dim() != 2:
                shapes = f"{list(pair[0].shape)} and {list(pair[1].shape)}"
                raise AdapterError(
                    f"{path}: lora_A and lora_B of {printable(module)} must have two dimensions "
                    f"(got {shapes})"
                )
            wrapped.setdefault(holder, {})[module] = pair
        else:
            modules[module] = pair
    parameters: dict[str, Pair] = {}
    for holder, found in wrapped.items():
        names = _known_parameters(path, holder, config.targets, len(found))
        parameters |= _assign(path, config, [f"{holder}.{name}" for name in names], found)
    return modules, parameters


def unflatten(what: str, a: Tensor, b: Tensor, rank: int) -> Pair:
    """a [experts * r, in], b [out, r * experts] -> [experts, r, in], [experts, out, r]; views of
    them. AdapterError."""
    rows = a.shape[0]
    if b.shape[1] != rows or rows % rank:
        raise AdapterError(
            f"{what} must be [experts * {rank}, in] and [out, {rank} * experts] "
            f"(got {list(a.shape)} and {list(b.shape)})"
        )
    return (
        a.reshape(-1, rank, a.shape[1]),
        b.reshape(b.shape[0], rank, -1).permute(2, 0, 1),
    )


def _known_parameters(
    path: Path, holder: str, targets: TargetRule, num_pairs: int
) -> tuple[str, ...]:
    names = targets.parameters_of(holder)
    unknown = sorted(set(names) - {_GATE_UP, _DOWN})
    if unknown:
        parameter = printable(f"{holder}.{unknown[0]}")
        raise AdapterError(
            f"{path}: {parameter} cannot be served: of bare parameters, only "
            f"{_GATE_UP} and {_DOWN} of experts may have factors"
        )
    if num_pairs != len(names):
        raise AdapterError(
            f"{path}: {printable(holder)} must have factors for {' and '.join(names)}, as "
            f"target_parameters says (got {num_pairs} pairs)"
        )
    return names


def _assign(
    path: Path, config: PeftConfig, names: list[str], found: Mapping[str, Pair]
) -> dict[str, Pair]:
    if len(names) == 1:
        (name,), ((module, (a, b)),) = names, found.items()
        if a.shape[1:] == b.shape[:1]:
            raise AdapterError(
                f"{path}: the input and the output of {printable(name)} cannot be distinguished, "
                f"both have {a.shape[1]} features; adapt {_GATE_UP} and {_DOWN} together"
            )
        return {
            name: unflatten(f"{path}: factors of {printable(module)}", a, b, config.rank_of(name))
        }
    gate_up, down = sorted(names, key=lambda name: name.endswith(f".{_DOWN}"))
    for order, turned in product((1, -1), (False, True)):
        first, last = list(found.items())[::order]
        if _fit(first[1], last[1], turned=turned):
            return {
                name: _oriented(path, module, pair, config.rank_of(name), turned=turned)
                for name, (module, pair) in ((gate_up, first), (down, last))
            }
    shapes = ", ".join(str(list(t.shape)) for pair in found.values() for t in pair)
    modules = " and ".join(map(printable, found))
    raise AdapterError(
        f"{path}: the shapes of {modules} must be those of {_GATE_UP} and {_DOWN} (got {shapes})"
    )


def _fit(gate_up: Pair, down: Pair, *, turned: bool) -> bool:
    # hidden -> 2 * intermediate and intermediate -> hidden; of the four ways to read two
    # pairs, no two can fit at once
    hidden, double = _ends(gate_up, turned=turned)
    intermediate, out = _ends(down, turned=turned)
    return out == hidden and double == 2 * intermediate


def _ends(pair: Pair, *, turned: bool) -> tuple[int, int]:
    a, b = pair
    ends = (a.shape[-1], b.shape[0])
    return (ends[1], ends[0]) if turned else ends


def _oriented(path: Path, module: str, pair: Pair, rank: int, *, turned: bool) -> Pair:
    a, b = unflatten(f"{path}: factors of {printable(module)}", *pair, rank)
    if turned:
        # releases before 0.19.1 read [experts, out, in] as [experts, in, out] (vllm #52194)
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return a, b
