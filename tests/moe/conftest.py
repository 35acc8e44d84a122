"""These tests are about host logic and small numbers: they run in Triton's interpreter even on a
machine with a GPU. The switch must be set before lorakernels is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from ..watched import stacked, watched_kernels  # noqa: F401
