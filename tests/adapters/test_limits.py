"""Limits of adapter files: what is exactly at a limit is taken, one beyond it is refused."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lorakernels.adapters import expressions
from lorakernels.adapters.errors import AdapterError, listing
from lorakernels.adapters.expressions import (
    Expression,
    ExpressionError,
    check_expression,
    limited_matching,
)
from lorakernels.adapters.files import MAX_TEXT_BYTES
from lorakernels.adapters.peft_config import PeftConfig, read_peft_config
from lorakernels.adapters.peft_folder import read_peft_folder

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(PLAIN | changes))
    return path


def read(folder: Path, **changes: Any) -> PeftConfig:
    return read_peft_config(write(folder, **changes))


def save(folder: Path, a: Tensor, b: Tensor, module: str = "q_proj") -> Path:
    key = f"base_model.model.{module}.lora_"
    save_file({f"{key}A.weight": a, f"{key}B.weight": b}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 1),
        ("rank_pattern", {"q_proj": 1}),
        ("lora_alpha", 1),
        ("lora_alpha", 1e-3),
        ("lora_alpha", -2),
        ("alpha_pattern", {"q_proj": -0.5}),
    ],
)
def test_the_smallest_ranks_and_any_finite_alpha_are_taken(
    tmp_path: Path, field: str, value: Any
) -> None:
    config = read(tmp_path, **{field: value})
    given = value["q_proj"] if isinstance(value, dict) else value
    if field in ("r", "rank_pattern"):
        assert config.rank_of("q_proj") == given
    else:
        assert config.scale_of("q_proj") == given / 4


@pytest.mark.parametrize("field", ["lora_alpha", "alpha_pattern"])
@pytest.mark.parametrize("value", [True, False, 0.0, -0.0, None, "1", [1]])
def test_what_is_no_number_other_than_0_is_no_alpha(
    tmp_path: Path, field: str, value: object
) -> None:
    given = {"q_proj": value} if field == "alpha_pattern" else value
    with pytest.raises(AdapterError, match="must be a finite number other than 0"):
        read(tmp_path, **{field: given})


@pytest.mark.parametrize("value", [-1, 0, True, 2.0, "2", None])
def test_what_is_no_positive_integer_is_no_rank_of_a_pattern(tmp_path: Path, value: object) -> None:
    with pytest.raises(AdapterError, match="must be an integer of at least 1"):
        read(tmp_path, rank_pattern={"q_proj": value})


def test_as_many_patterns_as_are_allowed_are_read(tmp_path: Path) -> None:
    patterns = {f"m{number}": 1 + number for number in range(4096)}
    assert read(tmp_path, rank_pattern=patterns).rank_pattern == patterns


def test_a_config_of_exactly_the_largest_size_is_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes().ljust(MAX_TEXT_BYTES))
    assert read_peft_config(path).rank == 4
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(AdapterError, match=r"must have at most 16 MiB \(got 16777217 bytes\)"):
        read_peft_config(path)


def test_an_expression_of_exactly_the_largest_length_is_one() -> None:
    check_expression("a" * expressions.MAX_LENGTH)


def test_an_expression_that_is_too_long_for_its_use_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    # not too long by itself, but with what is put around it
    pattern = "a" * expressions.MAX_LENGTH
    with pytest.raises(
        AdapterError, match=r"expression: of at most 4096 characters, not 41\d\d \("
    ):
        read(tmp_path, rank_pattern={pattern: 4})


def test_an_expression_that_one_of_both_engines_refuses_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for engine in (re, expressions.regex):
        with monkeypatch.context() as changed:
            changed.setattr(engine, "compile", partial(_refuse, engine))
            assert _reason("q_proj").startswith("not with this engine")


def _refuse(engine: Any, text: str) -> None:
    raise engine.error("not with this engine", text)


def _reason(text: str) -> str:
    # pytest.raises(match=...) would need the engine itself
    try:
        check_expression(text)
    except ExpressionError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("names", [1, 3, 4, 5])
def test_a_listing_says_how_many_names_are_left_out_only_if_there_are_any(names: int) -> None:
    shown = listing([f"m{number}" for number in range(names)])
    assert shown == (
        "m0, m1, m2, m3 and 1 more" if names == 5 else "m0, m1, m2, m3"[: 4 * names - 2]
    )


@pytest.mark.parametrize("rank", [1, 512])
def test_the_smallest_and_the_largest_rank_are_read(tmp_path: Path, rank: int) -> None:
    write(tmp_path, r=rank)
    adapter = read_peft_folder(save(tmp_path, torch.ones(rank, 1), torch.ones(1, rank)))
    assert adapter.modules["q_proj"].rank == rank


def test_the_largest_rank_of_stacked_experts_is_read(tmp_path: Path) -> None:
    write(tmp_path, r=512, target_modules=["up_proj"])
    save(tmp_path, torch.ones(2, 512, 1), torch.ones(2, 1, 512), "experts.up_proj")
    assert read_peft_folder(tmp_path).modules["experts.up_proj"].rank == 512


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((4,), (8, 4), "lora_A of q_proj must have two dimensions (got shape [4])"),
        ((4, 8), (8,), "lora_B of q_proj must have two dimensions (got shape [8])"),
        ((4, 8), (8, 4, 1), "lora_B of q_proj must have two dimensions (got shape [8, 4, 1])"),
        ((4, 0), (8, 4), "lora_A of q_proj must have two dimensions (got shape [4, 0])"),
        ((4, 8), (0, 4), "lora_B of q_proj must have two dimensions (got shape [0, 4])"),
        ((0, 8), (8, 0), "lora_A of q_proj must have two dimensions (got shape [0, 8])"),
        ((3, 8), (8, 4), "lora_A of q_proj must have rank 4"),
        ((4, 8), (8, 3), "lora_B of q_proj must have rank 4"),
    ],
)
def test_each_factor_of_a_linear_module_is_checked_by_itself(
    tmp_path: Path, a: tuple[int, ...], b: tuple[int, ...], message: str
) -> None:
    write(tmp_path)
    with pytest.raises(AdapterError) as raised:
        read_peft_folder(save(tmp_path, torch.ones(a), torch.ones(b)))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((3, 4, 8), (12, 4), "lora_B of {} must have the axis of experts in both factors"),
        ((12, 8), (3, 8, 4), "lora_A of {} must have the axis of experts in both factors"),
        ((3, 4, 0), (3, 8, 4), "lora_A of {} must have the axis of experts in both factors"),
        ((3, 4, 8), (3, 0, 4), "lora_B of {} must have the axis of experts in both factors"),
        ((3, 4, 8, 1), (3, 8, 4), "lora_A of {} must have the axis of experts in both factors"),
        ((3, 5, 8), (3, 8, 4), "lora_A of {} must have rank 4"),
        ((3, 4, 8), (3, 8, 5), "lora_B of {} must have rank 4"),
        ((12, 8), (8, 16), "factors of {} must be [experts * 4, in] and [out, 4 * experts]"),
        ((16, 8), (8, 12), "factors of {} must be [experts * 4, in] and [out, 4 * experts]"),
        ((10, 8), (8, 10), "factors of {} must be [experts * 4, in] and [out, 4 * experts]"),
    ],
)
def test_each_factor_of_stacked_experts_is_checked_by_itself(
    tmp_path: Path, a: tuple[int, ...], b: tuple[int, ...], message: str
) -> None:
    module = "experts.up_proj"
    write(tmp_path, target_modules=["up_proj"])
    with pytest.raises(AdapterError) as raised:
        read_peft_folder(save(tmp_path, torch.ones(a), torch.ones(b), module))
    assert message.format(module) in str(raised.value)


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_dtype_of_each_factor_is_checked(
    tmp_path: Path, side: str, dtype: torch.dtype, stacked: bool
) -> None:
    lead, module = ((3,), "experts.up_proj") if stacked else ((), "q_proj")
    factors = {"a": torch.ones(*lead, 4, 8), "b": torch.ones(*lead, 8, 4)}
    factors[side] = factors[side].to(dtype)
    write(tmp_path, target_modules=["q_proj", "up_proj"])
    name = f"lora_{side.upper()} of {module}"
    with pytest.raises(AdapterError, match=f"{name} must be float16, bfloat16 or float32"):
        read_peft_folder(save(tmp_path, factors["a"], factors["b"], module))


def timeouts_of(monkeypatch: pytest.MonkeyPatch, took: float) -> list[float]:
    """The time that each match gets from now on, where each takes as long as is said."""

    class Matching:
        def match(self, name: str, timeout: float) -> None:
            given.append(timeout)

    given: list[float] = []
    # a match begins at 0
    clock = cycle((0.0, took))
    monkeypatch.setattr(expressions, "_compiled", lambda text: Matching())
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    return given


def test_a_slow_match_is_named_alone_while_the_others_have_left_it_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Matching:
        def match(self, name: str, timeout: float) -> None:
            raise TimeoutError

    monkeypatch.setattr(expressions, "_compiled", lambda text: Matching())
    monkeypatch.setattr(expressions, "_Budget", partial(expressions._Budget, total=0.5))
    with pytest.raises(AdapterError, match=r"^file: field: the expression 'a' takes more than"):
        Expression("a", "a", "file: field").match("q_proj")


@pytest.mark.parametrize("step", [1 / 4096, 1 / 2])
def test_quick_and_slow_matches_of_one_adapter_share_the_whole_limit(
    monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """`step` is what a match takes."""
    given = timeouts_of(monkeypatch, step)
    monkeypatch.setattr(expressions, "_Budget", partial(expressions._Budget, total=4.0))
    expression = Expression("a", "a", "file: field")
    message = "and the others of this adapter take more than"
    with limited_matching():
        for _ in range(int(4 / step)):
            expression.match("a")
        with pytest.raises(AdapterError, match=message):
            expression.match("a")
    # the next adapter is not to blame
    with limited_matching():
        expression.match("a")
    assert given[-1] == 1.0


@pytest.mark.parametrize(
    ("took", "timeouts"), [(0.001, [1.0, 1.0, 1.0]), (0.0011, [1.0, 0.9989, 0.9978])]
)
def test_only_a_match_that_takes_longer_than_an_ordinary_one_counts_as_slow(
    monkeypatch: pytest.MonkeyPatch, took: float, timeouts: list[float]
) -> None:
    given = timeouts_of(monkeypatch, took)
    with limited_matching():
        for _ in range(3):
            Expression("a", "a", "file: field").match("a")
    assert given == pytest.approx(timeouts)


def test_a_match_that_no_adapter_asks_for_has_a_limit_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = timeouts_of(monkeypatch, 0.5)
    with limited_matching():
        Expression("a", "a", "file: field").match("a")
    for _ in range(3):
        Expression("a", "a", "file: field").match("a")
    assert given == [1.0] * 4


@pytest.mark.parametrize(
    ("field", "value"), [("layers_to_transform", [0]), ("layers_pattern", ["layers"])]
)
def test_a_choice_of_layers_is_refused_with_an_expression(
    tmp_path: Path, field: str, value: object
) -> None:
    with pytest.raises(AdapterError, match=f"{field} must be null when target_modules is a string"):
        read(tmp_path, target_modules=".*q_proj", **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers_to_transform", True),
        ("layers_to_transform", [0, False]),
        ("layers_to_transform", "0"),
    ],
)
def test_what_is_no_number_chooses_no_layer(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(AdapterError, match=f"{field} must be an integer or a list of integers"):
        read(tmp_path, **{field: value})


@pytest.mark.parametrize(
    ("field", "nearest"),
    [("use_doraa", "use_dora"), ("task_typ", "task_type"), ("exclude_modulez", "exclude_modules")],
)
def test_an_unknown_field_is_refused_with_the_nearest_of_all_fields(
    tmp_path: Path, field: str, nearest: str
) -> None:
    with pytest.raises(AdapterError, match=f"; did you mean '{nearest}'"):
        read(tmp_path, **{field: True})
