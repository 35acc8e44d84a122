"""Which rotary embeddings a decoder serves: those whose angles depend on positions alone."""

from __future__ import annotations

import pytest
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lorakernels.serving.checks import check_rope

# `dynamic_rope_update` of transformers computes these anew when the longest request grows
OF_THE_LONGEST_REQUEST = {"dynamic", "longrope"}
_FACTORS = {"factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
_LIMITS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("kind", ["default", *ROPE_INIT_FUNCTIONS])
def test_angles_that_depend_on_the_longest_request_are_refused_and_no_others(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, **_FACTORS, **_LIMITS}
    config = Qwen3Config(head_dim=8, rope_parameters=rope)
    if kind in OF_THE_LONGEST_REQUEST:
        with pytest.raises(ValueError, match=rf"depend on the lengths in a batch \(got {kind}\)"):
            check_rope(config)
    else:
        check_rope(config)


def test_a_model_without_rotary_embeddings_is_served() -> None:
    config = Qwen3Config()
    config.rope_parameters = None
    check_rope(config)
