"""Reads adapter_config.json, strictly.

Invariant: everything that a config asks for is either implemented or refused. A field that would
change the arithmetic and is not implemented may only have a value that switches it off. The same
holds for an unknown field, since newer releases of PEFT add fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lorakernels.adapters.errors import AdapterError, hint, printable
from lorakernels.adapters.expressions import (
    ExpressionError,
    check_expression,
    number_of_groups,
)
from lorakernels.adapters.files import read_small_file
from lorakernels.adapters.peft_targets import (
    TargetRule,
    layer_expression,
    matching_pattern,
    module_expression,
)

# none of these changes what the adapter computes
_DESCRIPTIVE = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
        "velora_config",
    }
)
_READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "use_rslora",
    }
)
# field -> why it is refused when it is switched on
_REFUSED = MappingProxyType(
    {
        "alora_invocation_tokens": "activated LoRA applies to a part of the prompt only",
        "arrow_config": "Arrow routes between adapters",
        "corda_config": "CorDA changes the base weights",
        "ensure_weight_tying": "tied adapters share factors between modules",
        "fan_in_fan_out": "the weights of such layers are stored transposed",
        "kasa_config": "KaSA changes the base weights",
        "layer_replication": "it changes the layers of the base model",
        "loftq_config": "LoftQ changes the base weights",
        "lora_bias": "a bias of lora_B is not applied",
        "lora_ga_config": "LoRA-GA changes the base weights",
        "megatron_config": "Megatron layers are cut in another way",
        "modules_to_save": "it replaces whole modules of the base model",
        "monteclora_config": "MonteCLoRA samples its factors",
        "trainable_token_indices": "it replaces rows of the embedding",
        "use_bdlora": "its factors are block-diagonal",
        "use_dora": "DoRA rescales the base weights",
        "use_qalora": "QA-LoRA pools the input",
    }
)
# other ways to initialise leave a base model behind that is not the published one
_SOUND_INITS = (True, False, "gaussian", "eva", "orthogonal")
# one for each module of a large model, several times over
_MOST_PATTERNS = 4096
_REQUIRED = ("peft_type", "r", "lora_alpha", "target_modules")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The part of adapter_config.json that decides what the adapter computes."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: TargetRule
    file: str = dataclass_field(default="", compare=False)

    def rank_of(self, module: str) -> int:
        key = self.rank_key_of(module)
        return self.rank if key is None else self.rank_pattern[key]

    def rank_key_of(self, module: str) -> str | None:
        """The pattern that gives a module its rank; None where `r` does."""
        return matching_pattern(self.rank_pattern, module, f"{self.file}: rank_pattern")

    def scale_of(self, module: str) -> float:
        """alpha / r, with rsLoRA alpha / sqrt(r); both by the patterns of the module."""
        key = matching_pattern(self.alpha_pattern, module, f"{self.file}: alpha_pattern")
        alpha = self.alpha if key is None else self.alpha_pattern[key]
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_peft_config(path: Path) -> PeftConfig:
    """Raises AdapterError that names the file, the field, what was given and what is allowed."""
    fields = _Fields(path, _read_json(path))
    fields.refuse_unsupported()
    return PeftConfig(
        rank=fields.positive_int("r", fields.values["r"]),
        alpha=fields.number("lora_alpha", fields.values["lora_alpha"]),
        use_rslora=fields.flag("use_rslora"),
        rank_pattern=fields.pattern("rank_pattern", fields.positive_int),
        alpha_pattern=fields.pattern("alpha_pattern", fields.number),
        targets=fields.targets(),
        file=str(path),
    )


class _Fields:
    """The raw values of a config, taken out one by one with their checks."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values

    def error(self, field: str, given: object, allowed: str) -> AdapterError:
        got = printable(repr(given))
        return AdapterError(f"{self.path}: {printable(field)} must be {allowed} (got {got})")

    def refuse_unsupported(self) -> None:
        for field in _REQUIRED:
            if field not in self.values:
                raise AdapterError(f"{self.path}: {field} is missing{hint(field, self.values)}")
        for field, value in self.values.items():
            if field in _READ or field in _DESCRIPTIVE or not value:
                continue
            got = printable(repr(value))
            if field in _REFUSED:
                raise AdapterError(
                    f"{self.path}: {field} is not supported: {_REFUSED[field]} (got {got})"
                )
            known = _READ | _DESCRIPTIVE | _REFUSED.keys()
            raise AdapterError(
                f"{self.path}: {printable(field)} is not a known field, so its value may only be "
                f"null, false or empty (got {got}){hint(field, known)}"
            )
        self._one_of("peft_type", ("LORA",))
        self._one_of("bias", ("none",), default="none")
        self._one_of("init_lora_weights", _SOUND_INITS, default=True)

    def _one_of(self, field: str, allowed: tuple[object, ...], default: object = None) -> None:
        given = self._value(field, default)
        # 1 == True, but a number is not a flag
        if not any(type(given) is type(option) and given == option for option in allowed):
            raise self.error(field, given, " or ".join(json.dumps(option) for option in allowed))

    def _value(self, field: str, default: object) -> object:
        """A field that is missing or null has its default."""
        value = self.values.get(field)
        return default if value is None else value

    def flag(self, field: str) -> bool:
        value = self._value(field, False)
        if not isinstance(value, bool):
            raise self.error(field, value, "true or false")
        return value

    def positive_int(self, field: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(field, value, "an integer of at least 1")
        return value

    def number(self, field: str, value: object) -> float:
        # an alpha of 0 would serve the base model under the adapter's name
        allowed = "a finite number other than 0"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(field, value, allowed)
        try:
            number = float(value)
        except OverflowError as huge:
            raise self.error(field, value, allowed) from huge
        if not math.isfinite(number) or number == 0:
            raise self.error(field, value, allowed)
        return number

    def pattern(self, field: str, check: Any) -> Mapping[str, Any]:
        value = self.values.get(field) or {}
        if not isinstance(value, dict):
            raise self.error(field, value, "an object of pattern and value")
        if len(value) > _MOST_PATTERNS:
            raise self.error(field, f"{len(value)} patterns", f"at most {_MOST_PATTERNS} patterns")
        for key in value:
            self._regex(field, key, module_expression(key))
        return MappingProxyType({k: check(f"{field}[{k!r}]", v) for k, v in value.items()})

    def targets(self) -> TargetRule:
        modules = self._names_or_regex("target_modules")
        parameters = self._parameters()
        if not modules and not parameters:
            given = self.values["target_modules"]
            raise self.error("target_modules", given, "a list of names or an expression")
        if isinstance(modules, str) and modules.lower() == "all-linear":
            # PEFT saves the list of modules instead; the name alone does not show what is missing
            raise self.error("target_modules", modules, "spelled out, as PEFT saves it")
        layers = self._as_list("layers_to_transform", int, "an integer or a list of integers")
        pattern = self._as_list("layers_pattern", str, "a name or a list of names")
        if self.values.get("layers_pattern") == "":
            # any list of layers, as PEFT takes it
            pattern = ()
        for key in pattern:
            self._regex("layers_pattern", key, layer_expression(key))
            if number_of_groups(key):
                raise self.error("layers_pattern", key, "an expression without numbered groups")
        if isinstance(modules, str) and (layers or pattern):
            field = "layers_to_transform" if layers else "layers_pattern"
            raise self.error(field, self.values[field], "null when target_modules is a string")
        exclude = self._names_or_regex("exclude_modules")
        return TargetRule(modules, exclude, layers, pattern, parameters, str(self.path))

    def _parameters(self) -> tuple[str, ...]:
        value = self.values.get("target_parameters")
        if isinstance(value, str):
            # PEFT refuses a string here as well: parameters have no expressions
            raise self.error("target_parameters", value, "a list of names")
        return self._as_list("target_parameters", str, "a list of names")

    def _names_or_regex(self, field: str) -> str | tuple[str, ...]:
        value = self.values.get(field)
        if isinstance(value, str):
            self._regex(field, value, value)
            return value
        return self._as_list(field, str, "a list of names or an expression")

    def _as_list(self, field: str, kind: type, allowed: str) -> tuple[Any, ...]:
        value = self.values.get(field)
        if value is None:
            return ()
        entries = value if isinstance(value, list) else [value]
        if not all(isinstance(e, kind) and not isinstance(e, bool) for e in entries):
            raise self.error(field, value, allowed)
        return tuple(entries)

    def _regex(self, field: str, value: str, used_as: str) -> None:
        # as it will be used: "(?i)q" is an expression, but not inside of another one
        for text in (value, used_as):
            try:
                check_expression(text)
            except ExpressionError as bad:
                # a position in the expression that is built around it would only confuse
                why = bad if text == value else bad.reason
                raise self.error(field, value, f"a regular expression: {why}") from bad


def _read_json(path: Path) -> Mapping[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise AdapterError(f"{path}: {printable(key)} is given twice")
            result[key] = value
        return result

    content = read_small_file(path)
    try:
        values = json.loads(content.decode(), object_pairs_hook=unique)
    except AdapterError:
        raise
    # a number of thousands of digits is a plain ValueError, too many brackets are a RecursionError
    except (ValueError, RecursionError) as bad:
        raise AdapterError(f"{path}: not a JSON file: {bad}") from bad
    if not isinstance(values, dict):
        raise AdapterError(f"{path}: must be a JSON object (got {type(values).__name__})")
    return values
