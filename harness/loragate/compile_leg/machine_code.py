"""Whether the machine code of a kernel reads a uniform register that nothing has written.

Triton's assembler, ptxas, may lose the instruction that computes a value and keep those that use
it. The kernel then compiles, with plausible resources, and takes a matrix descriptor or an address
from whatever the register holds on that GPU at that time: results are wrong, or a kernel faults,
and neither its source nor its PTX shows why.

A finding is a uniform register (UR0, UR1, ...) whose first mention, in the order of the text, is a
read. Any write that stands ahead of a read counts, even one for another purpose or on another path,
so that a finding does not depend on which paths are taken; not every bug of this kind is seen. It
rests on ptxas placing a block that writes ahead of those that read what it wrote. Ordinary
registers and predicates are not judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loragate.compile_leg.cubin import run_tool

_ADDRESS = re.compile(r"\s*/\*([0-9a-f]{4,})\*/")
_INSTRUCTION = re.compile(_ADDRESS.pattern + r"\s+(?:@!?\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_REGISTER = re.compile(r"\bUR(\d+)\b")
_RESULT = re.compile(r"UR(\d+)")
_PREDICATE = re.compile(r"!?U?P(\d|T)")
# where the matrices of a product lie in shared memory
_MATRICES = re.compile(r"\bgdesc\[UR(\d+)\]")
_MEMORY = re.compile(r"\bdesc\[UR(\d+)\]")
# puts 16 bits into the lower half of a register, and keeps the upper half, whatever it is
_INTO_LOWER_HALF = re.compile(r"UPRMT (UR\d+), \w+, 0x76[0-3][0-3], \1")
# these begin with an operand that they read
_WITHOUT_RESULT = ("BRA", "BRX", "JMX", "CALL", "RET", "BAR")


@dataclass(frozen=True, slots=True)
class _Instruction:
    address: str
    name: str
    operands: Sequence[str]

    def __str__(self) -> str:
        return f"{self.name} {', '.join(self.operands)}"

    def writes(self) -> range:
        """Its result, which stands behind the predicates that are results as well."""
        at = self._result_at()
        found = _RESULT.fullmatch(self.operands[at]) if at is not None else None
        return _registers(int(found[1]), self._result_width()) if found else range(0)

    def reads(self) -> Iterator[int]:
        if _INTO_LOWER_HALF.fullmatch(str(self)):
            yield from _numbers(self.operands[1])
            return
        at = self._result_at()
        for number, operand in enumerate(self.operands):
            if number != at or not _RESULT.fullmatch(operand):
                yield from self._reads_of(operand, is_last=number == len(self.operands) - 1)

    def _reads_of(self, operand: str, *, is_last: bool) -> Iterator[int]:
        if found := _MATRICES.search(operand):
            yield from self._descriptors(int(found[1]))
            return
        is_pair = self._has_pairs(is_last=is_last) or bool(_MEMORY.search(operand))
        for number in _numbers(operand):
            yield from _registers(number, 2 if is_pair else 1)

    def _descriptors(self, first: int) -> range:
        if "GMMA" not in self.name:
            return _registers(first, 2)
        # with the left matrix in ordinary registers its descriptor is skipped, not left out
        is_left_loaded = self.operands[1].startswith("R")
        return range(first + 2 if is_left_loaded else first, first + 4)

    def _has_pairs(self, *, is_last: bool) -> bool:
        """Whether an operand is a pair of registers though only the name of the instruction says
        so: all of a sum of 64 bits, and what a wide product is added to."""
        return self.name == "UIADD3.64" or (is_last and self.name.startswith("UIMAD.WIDE"))

    def _result_at(self) -> int | None:
        kind = self.name.partition(".")[0]
        if kind in _WITHOUT_RESULT or kind.endswith("SETP"):
            return None
        others = (n for n, text in enumerate(self.operands) if not _PREDICATE.fullmatch(text))
        return next(others, None)

    def _result_width(self) -> int:
        if ".128" in self.name:
            return 4
        is_wide = ".64" in self.name or ".WIDE" in self.name or self.name.startswith("CS2UR")
        return 2 if is_wide else 1


def unwritten_registers(cubin: bytes) -> str:
    """The first read of a uniform register that nothing has written, as a sentence without a
    subject; empty if there is none. Raises RuntimeError."""
    done = run_tool("nvdisasm", cubin, "-c")
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed: {done.stderr.strip()}")
    return first_unwritten_read(done.stdout)


def first_unwritten_read(disassembly: str) -> str:
    """The same of a text by nvdisasm. Raises RuntimeError for one that cannot be read, because it
    would show no read at all."""
    written: set[int] = set()
    is_empty = True
    for instruction in _instructions(disassembly):
        is_empty = False
        for number in instruction.reads():
            if number not in written:
                what = f"reads UR{number}, which nothing has written"
                return f"{what}, in `{instruction}` at 0x{instruction.address}"
        written.update(instruction.writes())
    if is_empty:
        raise RuntimeError("nvdisasm shows no instruction")
    return ""


def _instructions(disassembly: str) -> Iterator[_Instruction]:
    for line in disassembly.splitlines():
        if not _ADDRESS.match(line):
            continue
        found = _INSTRUCTION.match(line)
        if found is None:
            raise RuntimeError(f"nvdisasm shows an instruction that is not known: {line.strip()}")
        address, name, operands = found.groups()
        yield _Instruction(address, name, re.split(r",\s*", operands))


def _numbers(operand: str) -> list[int]:
    return [int(number) for number in _REGISTER.findall(operand)]


def _registers(first: int, count: int) -> range:
    return range(first, first + count)
