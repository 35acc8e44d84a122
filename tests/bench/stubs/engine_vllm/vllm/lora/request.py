from __future__ import annotations


class LoRARequest:
    def __init__(self, lora_name, lora_int_id, lora_path):
        self.name, self.number, self.path = lora_name, lora_int_id, lora_path
