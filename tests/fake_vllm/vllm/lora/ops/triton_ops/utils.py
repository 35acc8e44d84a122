from __future__ import annotations

_LORA_A_PTR_DICT: dict[tuple[int, ...], object] = {}
_LORA_B_PTR_DICT: dict[tuple[int, ...], object] = {}
is_batch_invariant = True
