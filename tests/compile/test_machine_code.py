"""Uniform registers that a kernel's machine code reads and nothing has written."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest

from loragate.compile_leg import record, run
from loragate.compile_leg.cubin import run_tool
from loragate.compile_leg.machine_code import first_unwritten_read, unwritten_registers
from loragate.core.verdict import Verdict
from loragate.events.model import CompileResult, Event

# of a kernel for sm_90 that read nonsense: nothing mentions UR6 ahead of these lines
BAD = """
//--------------------- .text.moe_gemm_kernel     --------------------------
.text.moe_gemm_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   S2UR UR7, SR_CTAID.X ;
        /*0020*/                   ULDC UR4, c[0x0][0x284] ;
\t//## File "gemm.py", line 12
        /*3250*/                   UIADD3 UR16, UP0, UR6, 0x2, URZ ;
        /*3260*/                   USHF.R.S32.HI UR5, URZ, 0x1f, UR4 ;
        /*3280*/                   UIADD3.X UR17, UR6, -0x7fffffe0, URZ, UP0, !UPT ;
        /*3590*/                   UIADD3 UR6, UR7, 0x2000, URZ ;
        /*3610*/                   USHF.R.U32.HI UR6, URZ, 0x4, UR6 ;
"""

PTX = """
.version 8.0
.target sm_90
.address_size 64

.visible .entry store_sum(.param .u64 to, .param .u32 value)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<3>;
    ld.param.u64 %rd1, [to];
    ld.param.u32 %r1, [value];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r2, %ctaid.x;
    add.u32 %r1, %r1, %r2;
    st.global.u32 [%rd2], %r1;
    ret;
}
"""

TOY = """
import torch, triton
import triton.language as tl
from loragate.compile_leg import dry_launch


@triton.jit
def fill(x_ptr):
    tl.store(x_ptr + tl.arange(0, 64), 1)


def right(compute_capability):
    yield "fill", lambda: fill[(1,)](torch.empty(64, device="meta"))


def wrong(compute_capability):
    dry_launch.unwritten_registers = lambda cubin: f"reads UR6 of {cubin[1:4].decode()}"
    return right(compute_capability)
"""


def _disassembly(*instructions: str) -> str:
    """A kernel that writes UR0 to UR3 and then does `instructions`."""
    first = ("UMOV UR0, 0x1", "UMOV UR1, URZ", "ULDC.64 UR2, c[0x0][0x208]")
    lines = (f"/*{16 * n:04x}*/  {text} ;" for n, text in enumerate((*first, *instructions)))
    return "\n".join(lines)


def _register(*instructions: str) -> str:
    """The register that is found to be read; its instruction is the last one."""
    found = first_unwritten_read(_disassembly(*instructions))
    if not found:
        return ""
    match = re.fullmatch(r"reads (UR\d+), which nothing has written, in `(.*)` at 0x(.*)", found)
    assert match is not None
    last = re.sub(r"^@\S+ ", "", instructions[-1])
    assert match.groups()[1:] == (last, f"{16 * (len(instructions) + 2):04x}")
    return match[1]


def test_a_register_that_is_read_before_it_is_written_is_named_with_its_instruction() -> None:
    assert first_unwritten_read(BAD) == (
        "reads UR6, which nothing has written, in `UIADD3 UR16, UP0, UR6, 0x2, URZ` at 0x3250"
    )


def test_a_register_that_is_written_before_it_is_read_is_not_found() -> None:
    move = "        /*3240*/                   UMOV UR6, UR7 ;\n"
    at = BAD.index("\t//## File")
    assert first_unwritten_read(BAD[:at] + move + BAD[at:]) == ""


@pytest.mark.parametrize(
    ("instruction", "register"),
    [
        ("IMAD.U32 R2, RZ, RZ, UR9", "UR9"),
        ("@!UP0 UIADD3 UR4, UR9, 0x1, URZ", "UR9"),
        ("UIADD3 UR9, UR9, 0x1, URZ", "UR9"),
        ("STS.128 [R4+UR9+0x400], R8", "UR9"),
        ("STG.E desc[UR2][R2.64], R5", ""),
        ("STG.E desc[UR3][R2.64], R5", "UR4"),
        ("BRA.DIV UR9, `(.L_x_4)", "UR9"),
        ("UISETP.GE.AND UP0, UPT, UR9, 0x1, UPT", "UR9"),
        ("ISETP.GE.AND P5, PT, R5, UR9, PT", "UR9"),
        ("UTCATOMSWS.AND URZ, UR9", "UR9"),
        ("UIADD3.64 UR8, UR2, -UR0, URZ", ""),
        ("UIADD3.64 UR8, UPT, UPT, UR3, 0x2, URZ", "UR4"),
        ("UIMAD.WIDE UR8, UR3, 0x2, UR2", ""),
        ("UIMAD.WIDE UR8, UR2, 0x2, UR3", "UR4"),
    ],
)
def test_every_register_of_an_operand_counts_as_read(instruction: str, register: str) -> None:
    assert _register(instruction) == register


@pytest.mark.parametrize(
    ("instruction", "count"),
    [
        ("UMOV UR8, 0x1", 1),
        ("@P0 R2UR UR8, R3", 1),
        ("UIADD3 UR8, UP0, UR3, 0x2, URZ", 1),
        ("UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR8, UR3", 1),
        ("VOTEU.ANY UR8, UPT, PT", 1),
        ("ULDC.64 UR8, c[0x0][0x208]", 2),
        ("UIMAD.WIDE.U32 UR8, UR3, 0x2, URZ", 2),
        ("CS2UR UR8, SR_CLOCKLO", 2),
        ("LDCU.128 UR8, c[0x0][0x380]", 4),
    ],
)
def test_an_instruction_writes_as_many_registers_as_its_result_is_wide(
    instruction: str, count: int
) -> None:
    for number in range(8, 8 + count):
        assert _register(instruction, f"MOV R2, UR{number}") == ""
    assert _register(instruction, f"MOV R2, UR{8 + count}") == f"UR{8 + count}"


@pytest.mark.parametrize(
    ("instruction", "register"),
    [
        # both matrices in shared memory
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR0], R24, gsb0", ""),
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR1].tnspB, R24", "UR4"),
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24", "UR4"),
        # the left one in ordinary registers: its two registers are not read
        ("HGMMA.64x64x16.F32.BF16 R24, R64, gdesc[UR0], R24", ""),
        ("HGMMA.64x64x16.F32.BF16 R24, R64, gdesc[UR4], R24", "UR6"),
        # tcgen05: a descriptor for each matrix
        ("UTCHMMA gdesc[UR0], gdesc[UR2], tmem[UR0], tmem[UR2], idesc[UR3], !UPT", ""),
        ("UTCHMMA gdesc[UR0], gdesc[UR3], tmem[UR0], tmem[UR2], idesc[UR3], !UPT", "UR4"),
        ("UTCHMMA tmem[UR0], gdesc[UR2], tmem[UR0], tmem[UR9], idesc[UR3], UPT", "UR9"),
        ("UTCHMMA gdesc[UR0], gdesc[UR2], tmem[UR0], tmem[UR2], idesc[UR9], UPT", "UR9"),
    ],
)
def test_a_product_reads_the_descriptors_of_the_matrices_in_shared_memory(
    instruction: str, register: str
) -> None:
    assert _register(instruction) == register


def test_the_left_matrix_in_registers_does_not_hide_its_neighbour() -> None:
    product = "HGMMA.64x64x16.F32.BF16 R24, R64, gdesc[UR4], R24"
    assert _register("UMOV UR6, UR0", product) == "UR7"
    assert _register("ULDC.64 UR6, c[0x0][0x210]", product) == ""


@pytest.mark.parametrize("selector", ["0x7632", "0x7610"])
def test_an_upper_half_that_is_kept_whatever_it_is_counts_as_no_read(selector: str) -> None:
    half = f"UPRMT UR51, UR2, {selector}, UR51"
    assert _register(half, "IMAD.U32 R27, RZ, RZ, UR51") == ""


@pytest.mark.parametrize(
    ("instruction", "register"),
    [
        ("UPRMT UR51, UR12, 0x7632, UR51", "UR12"),
        # its lower half is used
        ("UPRMT UR51, UR2, 0x5410, UR51", "UR51"),
        ("UPRMT UR51, UR2, 0x7632, UR50", "UR50"),
    ],
)
def test_what_else_a_permutation_reads_counts(instruction: str, register: str) -> None:
    assert _register(instruction) == register


def test_a_disassembly_without_instructions_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="shows no instruction"):
        first_unwritten_read('\t.headerflags\t@"EF_CUDA_SM90"\n.text.kernel:\n')


def test_an_instruction_of_an_unknown_form_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"that is not known: /\*0030\*/  umov ur4, ur5 ;"):
        first_unwritten_read(_disassembly("umov ur4, ur5"))


def test_what_is_no_binary_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"^nvdisasm failed: .*"):
        unwritten_registers(b"no binary")


def _assembled(folder: Path) -> bytes:
    import triton.backends.nvidia

    assembler = Path(triton.backends.nvidia.__path__[0]) / "bin" / "ptxas"
    source, target = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(PTX)
    command = [str(assembler), "--gpu-name=sm_90", str(source), "-o", str(target)]
    subprocess.run(command, check=True, timeout=60)
    return target.read_bytes()


def _without(cubin: bytes, name: str) -> bytes:
    """`cubin` with its only instruction called `name` replaced by one that does nothing."""
    text = run_tool("nvdisasm", cubin, "-hex").stdout

    def code_of(instruction: str) -> bytes:
        form = rf"\b{re.escape(instruction)}\b[^;]*;\s*/\* (0x\w+) \*/\s*/\* (0x\w+) \*/"
        found = re.search(form, text)
        assert found is not None
        return struct.pack("<QQ", *(int(word, 16) for word in found.groups()))

    assert cubin.count(code_of(name)) == 1
    return cubin.replace(code_of(name), code_of("NOP"))


def test_a_kernel_is_clean_until_the_instruction_that_writes_is_lost(tmp_path: Path) -> None:
    cubin = _assembled(tmp_path)
    assert unwritten_registers(cubin) == ""
    lossy = unwritten_registers(_without(cubin, "S2UR"))
    assert lossy.startswith(
        "reads UR4, which nothing has written, in `IADD3 R5, R5, UR4, RZ` at 0x"
    )


def test_a_kernel_that_was_translated_wrongly_fails_once_it_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_unwritten.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    baseline = tmp_path / "resources.json"
    record(provider="toy_unwritten:right", archs=(90,), baseline=baseline)

    def judged(provider: str, *, everything: bool) -> CompileResult:
        events: list[Event] = []

        class Writer:
            def write(self, event: Event) -> None:
                events.append(event)

        run(Writer(), provider=provider, archs=(90,), baseline=baseline, everything=everything)
        (result,) = (event for event in events if isinstance(event, CompileResult))
        return result

    right = judged("toy_unwritten:right", everything=True)
    assert (right.verdict, right.compiled) == (Verdict.PASS, True)
    wrong = judged("toy_unwritten:wrong", everything=True)
    assert (wrong.verdict, wrong.message) == (
        Verdict.FAIL,
        "was translated wrongly: reads UR6 of ELF",
    )
    unchanged = judged("toy_unwritten:wrong", everything=False)
    assert (unchanged.verdict, unchanged.compiled) == (Verdict.PASS, False)
