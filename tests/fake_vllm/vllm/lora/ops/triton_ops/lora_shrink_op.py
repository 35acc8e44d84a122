from __future__ import annotations


def get_lora_op_configs(operation: str, **shape: int) -> dict[str, int]:
    return {"block_k": 32, "split_k": 1}
