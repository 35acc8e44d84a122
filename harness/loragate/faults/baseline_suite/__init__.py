"""Tests in the usual style of the LoRA tests of serving engines, written anew.

They repeat the habits of those tests, not their code, so that the same faults meet both: data from
torch.rand (all positive), one fixed seed, a reference loop in the same dtype, loose tolerances,
powers of two as ranks, every adapter filling its buffers, one step per instance. docs/faults.md
says how far to trust the comparison.
"""
