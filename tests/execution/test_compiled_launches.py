"""What is recorded of a kernel that is launched in its compiled form; no device is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from loragate.core.machine import select_interpreter

select_interpreter()

from loragate.execution.streams.device import recorded_device  # noqa: E402
from loragate.execution.streams.recorder import Recorder  # noqa: E402
from loragate.execution.trace.operations import Launch  # noqa: E402

COPY = """
module {
  tt.func public @copy(%source: !tt.ptr<f32>, %target: !tt.ptr<f32>, %n: i32) {
    %0 = tt.load %source : !tt.ptr<f32>
    tt.store %target, %0 : !tt.ptr<f32>
    tt.return
  }
}
"""
CURRENT, SIDE = 3, 7


def compiled_kernel(monkeypatch: Any, source: Any, asm: dict[str, str]) -> Any:
    """A compiled form whose launches do nothing."""
    from triton.compiler import CompiledKernel

    def launcher(compiled: Any, grid: Any) -> Any:
        return lambda *args, stream=None: None

    monkeypatch.setattr(CompiledKernel, "__getitem__", launcher)
    kernel = CompiledKernel.__new__(CompiledKernel)
    kernel.src, kernel.asm, kernel.name = source, asm, "of_ir"
    return kernel


def test_its_tensors_are_read_and_written_on_the_stream_that_it_is_given(monkeypatch: Any) -> None:
    function = SimpleNamespace(__name__="copy")
    source = SimpleNamespace(
        fn=SimpleNamespace(fn=function, arg_names=["source", "target", "n", "BLOCK"])
    )
    kernel = compiled_kernel(monkeypatch, source, {"ttir": COPY})
    recorder = Recorder("cpu", lambda: CURRENT)
    x, y = torch.ones(4), torch.zeros(4)
    with recorded_device(recorder), recorder:
        kernel[(1, 1, 1)](x, y, 4, 256)
        kernel[(1, 1, 1)](y, x, 4, 256, stream=SIDE)
    launches = [op for op in recorder.trace().operations if isinstance(op, Launch)]
    assert [(one.name, one.stream) for one in launches] == [("copy", CURRENT), ("copy", SIDE)]
    names = [[(access.name, access.is_write) for access in one.accesses] for one in launches]
    assert names == [[("source", False), ("target", True)]] * 2
    blocks = [[access.block for access in one.accesses] for one in launches]
    assert blocks[0] == blocks[1][::-1]
    assert not recorder.unknown


def test_what_one_of_a_later_ir_accesses_is_unknown(monkeypatch: Any) -> None:
    kernel = compiled_kernel(monkeypatch, SimpleNamespace(), {"ptx": ""})
    recorder = Recorder("cpu", lambda: CURRENT)
    with recorded_device(recorder), recorder:
        kernel[(1, 1, 1)](torch.ones(4), 4, torch.zeros(4))
    assert dict(recorder.unknown) == {"of_ir": {"argument 0", "argument 2"}}
