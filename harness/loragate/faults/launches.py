"""Launches in a planted process: `python -m loragate.faults.launches ORDER TRANSCRIPT`.

They are compiled and judged as in the compile leg of the gate, for a GPU that need not be present.
With `--label LABEL` one launch is compiled, and what is wrong with it is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from loragate.compile_leg import ARCHS, BASELINE
from loragate.compile_leg.baseline import Record, load_baseline
from loragate.compile_leg.dry_launch import compile_launch, settle_process, triton_version
from loragate.compile_leg.judge import judge
from loragate.core.verdict import Failure, Verdict
from loragate.events.model import CompileResult
from loragate.faults.gate_contents import SUBJECT
from loragate.faults.model import Part, Sighting
from loragate.faults.order import Begun, Recorder, check_planted, read_order
from loragate.subjects.registry import SUBJECTS


def main(order_path: str, transcript_path: str) -> int:
    if order_path == "--label":
        settle_process()
        print(sighting_of(transcript_path).message)
        return 0
    order, recorder = read_order(Path(order_path)), Recorder(Path(transcript_path))
    check_planted(Path(order_path))
    settle_process()
    for label in order.launches:
        recorder.begin(Begun(label, "", Part.LAUNCH))
        recorder.record(sighting_of(label))
    return 0


def sighting_of(label: str) -> Sighting:
    """The first kernel of a launch that the leg would fail, on any of its GPUs, or a PASS."""
    wrong = next((result for result in _results(label) if result.verdict is Verdict.FAIL), None)
    if wrong is None:
        return Sighting(judge=label, case="", verdict=Verdict.PASS, part=Part.LAUNCH)
    return Sighting(
        judge=label,
        case="",
        verdict=Verdict.FAIL,
        failure=Failure.RESOURCES_GREW if wrong.resources else Failure.WRONG_ANSWER,
        message=f"{wrong.kernel} for {wrong.arch}: {wrong.message}",
        part=Part.LAUNCH,
    )


def _results(label: str) -> Iterator[CompileResult]:
    triton = triton_version()
    record = load_baseline(BASELINE).find(triton)
    provider = SUBJECTS[SUBJECT].launches
    assert provider is not None
    for arch in ARCHS:
        for item in compile_launch(provider, label, arch, _contents(record, arch)):
            yield judge(item, record, subject=SUBJECT, triton=triton)


def _contents(record: Record | None, arch: int) -> dict[tuple[str, str], str]:
    """What need not be compiled, because it is as on record."""
    found = record.contents if record else {}
    return {(kernel, what): c for (of, kernel, what), c in found.items() if of == f"sm_{arch}"}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
