"""What a generation config may ask of greedy decoding."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMode

# options that would change what greedy decoding gives -> the value that changes nothing
_NEUTRAL: dict[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_return_sequences": 1,
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "token_healing": False,
    "watermarking_config": None,
}


def check_config(config: GenerationConfig) -> None:
    """Raises ValueError for a config that asks for anything but greedy decoding."""
    if not isinstance(config, GenerationConfig):
        kind = type(config).__name__
        raise ValueError(f"config must be a GenerationConfig of transformers (got a {kind})")
    most = config.max_new_tokens
    if not isinstance(most, int) or most < 1:
        raise ValueError(f"max_new_tokens must be an integer of at least 1 (got {most})")
    mode = config.get_generation_mode()
    if mode is not GenerationMode.GREEDY_SEARCH:
        raise ValueError(f"generation config must ask for greedy search (got {mode.value})")
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise ValueError(f"{name} of the generation config is not supported (got {value})")


def end_tokens(config: GenerationConfig, default: GenerationConfig) -> frozenset[int]:
    """Those that end an answer: of `config`, or of `default` where it names none. ValueError."""
    ends = default.eos_token_id if config.eos_token_id is None else config.eos_token_id
    if isinstance(ends, Tensor):
        # its elements would be tensors, which equal no token
        ends = ends.tolist()
    if ends is None or isinstance(ends, int):
        return frozenset(() if ends is None else (ends,))
    if not isinstance(ends, list | tuple) or not all(isinstance(end, int) for end in ends):
        raise ValueError(f"eos_token_id must be an integer or a list of integers (got {ends!r})")
    return frozenset(ends)
