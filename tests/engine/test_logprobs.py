"""The bound of a log-probability: what arithmetic may change of the log-odds of a token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from loragate.engine.logprobs import log_odds_noise, squared_changes, wrong_logprobs
from loragate.engine.reference import Judged, Reference, log_odds
from loragate.engine.report import WrongLogprobs
from loragate.engine.requests import Completion, Request

FLOOR = 1e-3


def of_odds(odds: float) -> float:
    """The log-probability, where it is far enough from 0 to be computed so."""
    return math.log(1 / (1 + math.exp(-odds)))


def wrong(given: Sequence[float], odds: Sequence[float], noise: float) -> WrongLogprobs | None:
    judged = [Judged(0, 0, 0.0, 1.0, own) for own in odds]
    request = Request((1,), None, len(odds))
    answer = Completion((0,) * len(odds), tuple(given))

    def nobody(name: str) -> Reference:
        raise AssertionError(name)

    return wrong_logprobs(0, request, answer, judged, noise, names=(), reference=nobody)


def test_log_odds_are_those_of_the_probability_of_each_token() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, -3.0, 4.0]], dtype=torch.float64)
    tokens = torch.tensor([1, 0])
    p = logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_odds(logits, tokens), (p / (1 - p)).log())
    # 1 - p is 0 in fp64
    sure = torch.tensor([[80.0, 0.0]], dtype=torch.float64)
    assert log_odds(sure, torch.tensor([0])).item() == 80.0


def test_what_the_dtype_changes_is_measured_of_the_answer_alone() -> None:
    exact = torch.tensor([[1.0, 0.0], [3.0, 0.0], [50.0, 0.0]], dtype=torch.float64)
    low = torch.tensor([[1.5, 0.0], [2.0, 0.0], [0.0, 9.0]], dtype=torch.float64)
    assert squared_changes(exact, low, [0, 1]) == pytest.approx([0.25, 1.0])
    assert squared_changes(exact, low, []) == []


def test_the_noise_is_eight_times_the_root_mean_square_of_all_tokens_up_to_a_limit() -> None:
    assert log_odds_noise([0.01, 0.03], most=9.0) == pytest.approx(8 * math.sqrt(0.02))
    assert log_odds_noise([0.01, 0.03], most=0.5) == 0.5
    assert log_odds_noise([], most=9.0) == 0.0


@pytest.mark.parametrize("odds", [-2.0, 0.0, 1.5, 4.25])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_probability_may_be_off_by_what_the_noise_changes_of_its_log_odds(
    odds: float, sign: int
) -> None:
    noise = 1.5
    right = of_odds(odds + sign * noise)
    assert wrong([right + sign * 0.9 * FLOOR], [odds], noise) is None
    found = wrong([right + sign * 1.1 * FLOOR], [odds], noise)
    assert found is not None
    assert (found.position, found.wrong_tokens) == (0, 1)
    assert found.worst == pytest.approx(abs(right - of_odds(odds)), abs=2 * FLOOR)


def test_a_probability_near_1_may_move_less_than_another_one() -> None:
    noise, given = 1.875, -0.05
    assert wrong([given, given], [of_odds_inverse(-0.01), of_odds_inverse(-0.2)], noise) is None
    found = wrong([given, given], [9.0, 9.0], noise)
    assert found is not None
    assert found.wrong_tokens == 2


def of_odds_inverse(logprob: float) -> float:
    return logprob - math.log(-math.expm1(logprob))


def test_a_right_engine_passes_whose_answer_has_few_uncertain_tokens() -> None:
    """An H200 gave the first one of 9 tokens -0.04818, not -0.01411; of these tokens bf16 changes
    no log-probability by more than 0.0031, and log-odds as follows."""
    changes = [0.162, 0.166, 0.049, 0.439, 0.029, 0.438, 0.331, 0.516, 0.046]
    noise = log_odds_noise([change**2 for change in changes], most=1.875)
    assert wrong([-0.04818], [of_odds_inverse(-0.01411)], noise) is None
