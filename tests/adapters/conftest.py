"""These tests are about host logic and small numbers: they run in Triton's interpreter, also
where a GPU is at hand. The switch must stand before lorakernels is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
