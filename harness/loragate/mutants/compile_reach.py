"""`python -m loragate.mutants.compile_reach PACKAGE`: modules of which the compile leg runs code.

It does what the leg does for one GPU, up to Triton's first representation. Kernels are compiled and
not run; a module is also printed if it defines a `@triton.jit` function.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from loragate.compile_leg.baseline import load_baseline
from loragate.compile_leg.dry_launch import (
    compile_launch,
    list_labels,
    settle_process,
    triton_version,
)
from loragate.compile_leg.leg import BASELINE
from loragate.mutants.planting import SUBJECT
from loragate.subjects.registry import SUBJECTS

_ARCH = 90


def main(package: str) -> int:
    settle_process()
    folder, seen = Path(package), set[str]()
    provider = SUBJECTS[SUBJECT].launches
    assert provider is not None
    # imported before it is traced: every module runs code at import
    labels = list_labels(provider)
    record = load_baseline(BASELINE).find(triton_version())
    contents = record.contents if record else {}
    prefix = f"{folder}/"

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code.co_filename.startswith(prefix):
            seen.add(frame.f_code.co_filename.removeprefix(prefix))

    sys.settrace(enter)
    for label in labels:
        known = {key[1:]: content for key, content in contents.items() if key[0] == f"sm_{_ARCH}"}
        compile_launch(provider, label, _ARCH, known)
    sys.settrace(None)
    seen.update(
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if "@triton.jit" in path.read_text(encoding="utf-8")
    )
    print("\n".join(sorted(seen)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
