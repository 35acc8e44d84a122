"""Put the folder above on PYTHONPATH: a child process then finds a package that looks like vLLM.

Its dense operators are plain torch and right, except for what FAKE_VLLM names, words of
`vllm.lora.ops.triton_ops.Fault`. It has no MoE LoRA.
"""
