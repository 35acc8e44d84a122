"""One compiled kernel against its record -> one result. Pure.

A kernel with the content on record has the recorded resources; they are judged like any others.

FAIL: the kernel does not compile, its machine code reads a register that nothing has written, it
does not fit the GPU, uses memory without waiting for a kernel around it, spills more than recorded,
or needs more registers or shared memory than recorded by more than the margin. A smaller growth is
reported.
INCONCLUSIVE, which leaves a gate incomplete: there is no record to compare with, either for this
kernel or for this release of Triton, or a kernel on record was not compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from loragate.compile_leg.baseline import Key, Record, minor_release
from loragate.compile_leg.dry_launch import Compiled
from loragate.core.resources import Resources
from loragate.core.verdict import Verdict
from loragate.events.model import CompileResult

# registers are allocated to a warp in units of 8 per thread: within one unit nothing is lost
REGISTER_MARGIN = 8
# what the driver itself reserves of each block's shared memory
SHARED_MARGIN = 1024

# the most shared memory that one block may ask for, in bytes
SHARED_LIMIT: Mapping[str, int] = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
}

_UPDATE = "record it with `python -m loragate.compile_leg --update`"


def judge_all(
    compiled: Iterable[Compiled], record: Record | None, *, subject: str, triton: str
) -> Iterator[CompileResult]:
    """Results of all kernels that were compiled, then of those on record that were not."""
    done: set[Key] = set()
    for item in compiled:
        done.add(key_of(item))
        yield judge(item, record, subject=subject, triton=triton)
    recorded: Mapping[Key, Resources] = record.entries if record else {}
    for key in sorted(recorded.keys() - done):
        arch, kernel, specialisation = key
        yield CompileResult(
            subject=subject,
            kernel=kernel,
            specialisation=specialisation,
            arch=arch,
            verdict=Verdict.INCONCLUSIVE,
            baseline=recorded[key],
            compiled=False,
            message=f"is on record but was not compiled; if it is gone, {_UPDATE}",
        )


def judge(item: Compiled, record: Record | None, *, subject: str, triton: str) -> CompileResult:
    baseline = record.entries.get(key_of(item)) if record else None
    if item.unchanged:
        item = replace(item, resources=baseline)
    verdict, message = _verdict(item, baseline, known=record is not None, triton=triton)
    return CompileResult(
        subject=subject,
        kernel=item.kernel,
        specialisation=item.specialisation,
        arch=item.arch,
        verdict=verdict,
        resources=item.resources,
        baseline=baseline,
        message=message,
        compiled=not item.unchanged,
    )


def _verdict(
    item: Compiled, baseline: Resources | None, *, known: bool, triton: str
) -> tuple[Verdict, str]:
    if item.resources is None:
        return Verdict.FAIL, f"does not compile: {item.error}"
    if item.unwritten:
        return Verdict.FAIL, f"was translated wrongly: {item.unwritten}"
    if item.unordered:
        return Verdict.FAIL, f"is launched dependently: {item.unordered}"
    limit = SHARED_LIMIT[item.arch]
    if item.resources.shared_bytes > limit:
        needs = f"needs {item.resources.shared_bytes} bytes of shared memory"
        return Verdict.FAIL, f"{needs}, {item.arch} allows a block at most {limit}"
    if not known:
        release = minor_release(triton)
        return Verdict.INCONCLUSIVE, f"no baseline for Triton {release}; {_UPDATE}"
    if baseline is None:
        return Verdict.INCONCLUSIVE, f"no baseline for this kernel; {_UPDATE}"
    growth = tuple(_growth(item.resources, baseline))
    text = ", ".join(text for _, text in growth)
    if any(beyond for beyond, _ in growth):
        return Verdict.FAIL, f"resources grew: {text}"
    return Verdict.PASS, f"resources grew within the margin: {text}" if growth else ""


def _growth(now: Resources, before: Resources) -> Iterator[tuple[bool, str]]:
    """(beyond the margin, description) of each resource that grew."""
    for name, new, old, margin in (
        ("registers", now.registers, before.registers, REGISTER_MARGIN),
        ("spilled bytes", now.spills, before.spills, 0),
        ("shared bytes", now.shared_bytes, before.shared_bytes, SHARED_MARGIN),
    ):
        if new > old:
            yield new - old > margin, f"{name} {old} -> {new} (margin {margin})"


def key_of(item: Compiled) -> Key:
    return (item.arch, item.kernel, item.specialisation)
