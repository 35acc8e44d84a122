"""Compiles kernels with the real compiler, for a GPU that need not be present.

This runs in a process of its own, because the interpreter must be off before a kernel is imported.
"""

from __future__ import annotations

import os
import sys

from loragate.core.child_process import run_module

_DENSE = "lorakernels.specs:launches"
# the lowest rank, and one that is not a power of two
_DENSE_LABELS = ("qkv-bf16-r1-t512", "odd-bf16-r24-t33")
_MOE = "loragate.faults.checks.low_ranks:launches"
_MOE_LABELS = ("two_kernel", "one_shot")
_ARCH = 90
_DEADLINE_S = 50


def check_compiles() -> str | None:
    """Kernels of a linear layer."""
    return _compile(_DENSE, _DENSE_LABELS)


def check_experts_compile() -> str | None:
    """MoE kernels, with a rank below the smallest tile of a tensor core."""
    return _compile(_MOE, _MOE_LABELS)


def _compile(provider: str, labels: tuple[str, ...]) -> str | None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    answer = run_module(__name__, provider, *labels, env=environment, timeout=_DEADLINE_S)
    answer.check_returncode()
    return answer.stdout.decode().strip() or None


def _complaints(provider: str, labels: list[str]) -> list[str]:
    from loragate.compile_leg.dry_launch import compile_launch, settle_process

    settle_process()
    compiled = [item for label in labels for item in compile_launch(provider, label, _ARCH)]
    return [
        f"{item.kernel} of {item.specialisation} does not compile for {item.arch}: {item.error}"
        for item in compiled
        if item.resources is None
    ]


if __name__ == "__main__":
    print("\n".join(_complaints(sys.argv[1], sys.argv[2:])))
