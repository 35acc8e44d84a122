"""Which of several patterns that match a module sets its rank and its alpha."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lorakernels.adapters.peft_config import PeftConfig, read_peft_config

PATTERNS = ("q_proj", "layers.0.q_proj")
MODULES = ("layers.0.q_proj", "model.layers.0.q_proj", "model.layers.1.q_proj")

both_orders = pytest.mark.parametrize("patterns", [PATTERNS, PATTERNS[::-1]])


def read(folder: Path, ranks: dict[str, int], alphas: dict[str, int]) -> PeftConfig:
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(fields | {"rank_pattern": ranks, "alpha_pattern": alphas}))
    return read_peft_config(path)


@both_orders
def test_of_two_patterns_that_match_the_first_in_the_file_wins(
    patterns: tuple[str, str], tmp_path: Path
) -> None:
    first, second = patterns
    config = read(tmp_path, {first: 3, second: 5}, {first: 7, second: 9})
    for module in MODULES[:2]:
        assert (config.rank_of(module), config.scale_of(module)) == (3, 7 / 3)


@both_orders
def test_the_order_of_one_field_says_nothing_about_the_other(
    patterns: tuple[str, str], tmp_path: Path
) -> None:
    first, second = patterns
    config = read(tmp_path, {first: 3, second: 5}, {second: 9, first: 7})
    assert (config.rank_of(MODULES[0]), config.scale_of(MODULES[0])) == (3, 3.0)


@both_orders
def test_the_pattern_that_peft_takes_wins(patterns: tuple[str, str], tmp_path: Path) -> None:
    other = pytest.importorskip("peft.utils.other")
    ranks = dict(zip(patterns, (3, 5), strict=True))
    config = read(tmp_path, ranks, ranks)
    for module in MODULES:
        key = other.get_pattern_key(ranks.keys(), module)
        assert (config.rank_of(module), config.scale_of(module)) == (ranks[key], 1.0)
