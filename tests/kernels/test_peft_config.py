from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lorakernels.adapters.errors import AdapterError
from lorakernels.adapters.peft_config import PeftConfig, read_peft_config
from lorakernels.adapters.peft_targets import TargetRule

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}


def read(folder: Path, **changes: Any) -> PeftConfig:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(PLAIN | changes))
    return read_peft_config(path)


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(AdapterError) as raised:
        read(folder, **changes)
    prefix = f"{folder / 'adapter_config.json'}: "
    assert str(raised.value).startswith(prefix)
    return str(raised.value).removeprefix(prefix)


def test_scale_is_alpha_over_rank(tmp_path: Path) -> None:
    assert read(tmp_path).scale_of("layers.0.q_proj") == 1.5


def test_scale_of_rslora_is_alpha_over_the_root_of_the_rank(tmp_path: Path) -> None:
    config = read(tmp_path, use_rslora=True, rank_pattern={"v_proj": 9})
    assert config.scale_of("layers.0.q_proj") == 3.0
    assert config.scale_of("layers.0.v_proj") == 2.0


def test_patterns_set_rank_and_alpha_each_on_its_own(tmp_path: Path) -> None:
    config = read(tmp_path, rank_pattern={"q_proj": 8}, alpha_pattern={"v_proj": 20})
    assert (config.rank_of("m.q_proj"), config.scale_of("m.q_proj")) == (8, 0.75)
    assert (config.rank_of("m.v_proj"), config.scale_of("m.v_proj")) == (4, 5.0)


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "proj",
        "0.self_attn.q_proj",
        "self_attn",
        r"model\.layers\.0\.self_attn\.q_proj",
        "^model.layers.0.self_attn.q_proj",
        "layers.[02].self_attn.(q|k)_proj",
        r".*\.1\..*",
        "q_proj|v_proj",
        "_proj",
    ],
)
def test_patterns_match_the_modules_that_peft_matches(tmp_path: Path, pattern: str) -> None:
    other = pytest.importorskip("peft.utils.other")
    config = read(tmp_path, rank_pattern={pattern: 7, "k_proj": 5})
    for layer in (0, 1, 10):
        for name in ("q_proj", "k_proj", "v_proj", "my_q_proj"):
            module = f"model.layers.{layer}.self_attn.{name}"
            key = other.get_pattern_key(config.rank_pattern.keys(), module)
            assert config.rank_of(module) == config.rank_pattern.get(key, config.rank)


MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 11)
    for name in ("self_attn.q_proj", "self_attn.q_proj2", "mlp.experts.1.up_proj", "mlp.up_proj")
] + ["lm_head", "q_proj"]


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["proj", "lm_head"]},
        {"target_modules": r".*\.(q|up)_proj"},
        {"target_modules": "q_proj"},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["experts.1.up_proj"]},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*layers\.0\..*"},
        {"target_modules": ["q_proj"], "layers_to_transform": 0},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 11]},
        {"target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": ["experts"]},
        {"target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": ""},
        # of several patterns the first one that matches a name counts, in the order of the file
        *(
            {"target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": patterns}
            for patterns in (["h", "layers"], ["experts", "layers"], ["layers", "experts"])
        ),
        {"target_modules": ["model.layers.0.mlp.up_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": []},
    ],
)
def test_targets_are_the_modules_that_peft_targets(tmp_path: Path, fields: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    utils = pytest.importorskip("peft.tuners.tuners_utils")
    theirs = peft.LoraConfig(**fields)
    ours = read(tmp_path, **fields).targets
    expected = [m for m in MODULES if utils.check_target_module_exists(theirs, m)]
    assert [m for m in MODULES if ours.names_module(m)] == expected


def test_a_config_as_peft_writes_it_is_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    peft.LoraConfig(
        r=8, lora_alpha=4, use_rslora=True, target_modules=["q_proj"], alpha_pattern={"q_proj": 3}
    ).save_pretrained(tmp_path)
    config = read_peft_config(tmp_path / "adapter_config.json")
    assert config.targets == TargetRule(("q_proj",))
    assert config.scale_of("a.q_proj") == 3 / math.sqrt(8)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("use_dora", True, "use_dora is not supported: DoRA rescales the base weights (got True)"),
        (
            "modules_to_save",
            ["lm_head"],
            "modules_to_save is not supported: it replaces whole modules of the base model "
            "(got ['lm_head'])",
        ),
        (
            "lora_bias",
            True,
            "lora_bias is not supported: a bias of lora_B is not applied (got True)",
        ),
        (
            "fan_in_fan_out",
            True,
            "fan_in_fan_out is not supported: the weights of such layers are stored transposed "
            "(got True)",
        ),
        (
            "layer_replication",
            [[0, 2]],
            "layer_replication is not supported: it changes the layers of the base model "
            "(got [[0, 2]])",
        ),
        ("bias", "all", "bias must be \"none\" (got 'all')"),
        ("peft_type", "LOHA", "peft_type must be \"LORA\" (got 'LOHA')"),
        (
            "init_lora_weights",
            "pissa",
            'init_lora_weights must be true or false or "gaussian" or "eva" or "orthogonal" '
            "(got 'pissa')",
        ),
        ("init_lora_weights", 1, 'init_lora_weights must be true or false or "gaussian"'),
        ("r", 0, "r must be an integer of at least 1 (got 0)"),
        ("r", True, "r must be an integer of at least 1 (got True)"),
        ("r", 4.0, "r must be an integer of at least 1 (got 4.0)"),
        ("lora_alpha", "16", "lora_alpha must be a finite number other than 0 (got '16')"),
        ("lora_alpha", 0, "lora_alpha must be a finite number other than 0 (got 0)"),
        ("lora_alpha", math.nan, "lora_alpha must be a finite number other than 0 (got nan)"),
        ("use_rslora", "yes", "use_rslora must be true or false (got 'yes')"),
        (
            "rank_pattern",
            {"q_proj": 0},
            "rank_pattern['q_proj'] must be an integer of at least 1 (got 0)",
        ),
        (
            "alpha_pattern",
            {"(q_proj": 8},
            "alpha_pattern must be a regular expression: missing ), unterminated subpattern at "
            "position 0 (got '(q_proj')",
        ),
        (
            "rank_pattern",
            {"(?i)q_proj": 8},
            "rank_pattern must be a regular expression: global flags not at the start of the "
            "expression (got '(?i)q_proj')",
        ),
        (
            "layers_pattern",
            ["(?i)layers"],
            "layers_pattern must be a regular expression: global flags not at the start of the "
            "expression (got '(?i)layers')",
        ),
        (
            "layers_pattern",
            ["(layers|h)"],
            "layers_pattern must be an expression without numbered groups (got '(layers|h)')",
        ),
        ("rank_pattern", {"a{99999999999}": 8}, "rank_pattern must be a regular expression: the "),
        ("target_modules", "(" * 9000 + ")" * 9000, "target_modules must be a regular expression"),
        ("lora_alpha", 10**400, "lora_alpha must be a finite number other than 0 (got 1000000"),
        ("alpha_pattern", [8], "alpha_pattern must be an object of pattern and value (got [8])"),
        ("target_modules", [], "target_modules must be a list of names or an expression (got [])"),
        (
            "target_modules",
            "all-linear",
            "target_modules must be spelled out, as PEFT saves it (got 'all-linear')",
        ),
        (
            "target_modules",
            [1],
            "target_modules must be a list of names or an expression (got [1])",
        ),
        (
            "use_rslorra",
            True,
            "use_rslorra is not a known field, so its value may only be null, false or empty "
            "(got True); did you mean 'use_rslora'?",
        ),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    assert refusal(tmp_path, **{field: value}).startswith(message)


@pytest.mark.parametrize(
    "field",
    [
        "alora_invocation_tokens",
        "arrow_config",
        "corda_config",
        "ensure_weight_tying",
        "fan_in_fan_out",
        "kasa_config",
        "layer_replication",
        "loftq_config",
        "lora_bias",
        "lora_ga_config",
        "megatron_config",
        "modules_to_save",
        "monteclora_config",
        "trainable_token_indices",
        "use_bdlora",
        "use_dora",
        "use_qalora",
    ],
)
def test_a_variant_that_computes_something_else_is_refused(tmp_path: Path, field: str) -> None:
    for value in (True, [1], {"a": 1}):
        with pytest.raises(AdapterError, match=f"{field} is not supported: "):
            read(tmp_path, **{field: value})
    for off in (None, False, [], {}):
        read(tmp_path, **{field: off})


@pytest.mark.parametrize("field", ["use_rslora", "bias", "init_lora_weights"])
def test_null_is_the_default_of_a_field(tmp_path: Path, field: str) -> None:
    assert read(tmp_path, **{field: None}) == read(tmp_path)


def test_an_expression_is_not_subject_to_the_choice_of_layers() -> None:
    # PEFT chooses layers among the matches of a list only
    rule = TargetRule(r".*\.layers\.\d+\.(q|v)_proj", layers=(1,))
    assert rule.names_module("model.layers.0.q_proj")
    # which is no part of the text of the expression, as this name is
    assert TargetRule("layers.0.q_proj", layers=(1,)).names_module("layers.0.q_proj")
    assert not TargetRule(("q_proj",), layers=(1,)).names_module("model.layers.0.q_proj")


def test_an_unknown_field_that_is_switched_off_is_accepted(tmp_path: Path) -> None:
    assert read(tmp_path, use_something_new=False, something_config=None).rank == 4


def test_a_missing_field_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text('{"peft_type": "LORA", "r": 4, "lora_alfa": 8, "target_modules": ["q"]}')
    message = f"{path}: lora_alpha is missing; did you mean 'lora_alfa'?"
    with pytest.raises(AdapterError, match=f"^{re.escape(message)}$"):
        read_peft_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{",
            "not a JSON file: Expecting property name enclosed in double quotes: line 1 column 2",
        ),
        ("[]", "must be a JSON object (got list)"),
        ('{"r": 8, "r": 16}', "r is given twice"),
        ('{"lora_alpha": ' + "1" * 5000 + "}", "not a JSON file: Exceeds the limit"),
        ("[" * 100_000, "not a JSON file: "),
    ],
)
def test_a_file_that_is_not_a_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(text)
    with pytest.raises(AdapterError, match=f"^{re.escape(f'{path}: {message}')}"):
        read_peft_config(path)
