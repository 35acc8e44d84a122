"""Compile the launches of a subject in this process, for a GPU that need not be present.

Invariant: this runs in a process of its own, because Triton's driver is replaced for good and its
interpreter must be off before the first kernel is imported.

A provider is `module:function`; the function takes a compute capability, 90 for sm_90, and returns
(label, launch) pairs. `launch()` runs host code that launches kernels on tensors without data
(device "meta"); labels are unique and do not depend on the compute capability.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from loragate.compile_leg.content import content_of, settings_of_the_compiler
from loragate.compile_leg.cubin import read_resources
from loragate.compile_leg.machine_code import unwritten_registers
from loragate.core.resources import Resources

# errors of Triton's front end begin like this
_PLACE = re.compile(r"at \d+:\d+:")
# of each streaming multiprocessor from sm_100 on
_TENSOR_MEMORY_COLUMNS = 512

Launches: TypeAlias = Iterable[tuple[str, Callable[[], None]]]
# of a kernel and its specialisation
Contents: TypeAlias = Mapping[tuple[str, str], str]


@dataclass(frozen=True, slots=True)
class Compiled:
    """One specialisation of a kernel; `error` says why it did not compile. An `unchanged` one was
    not compiled, because its `content` is the recorded one. `unordered` says what it uses of the
    kernels around it without waiting for them, `unwritten` which register its machine code reads
    before anything writes it."""

    kernel: str
    specialisation: str
    arch: str
    resources: Resources | None
    error: str = ""
    content: str = ""
    unchanged: bool = False
    unordered: str = ""
    unwritten: str = ""


class ProviderError(RuntimeError):
    """A provider that cannot be imported, or whose launches are not as the module documents."""


def settle_process() -> None:
    """Make this process compile kernels; must run before Triton is imported."""
    assert "triton" not in sys.modules, "Triton has already read its environment variables"
    os.environ.pop("TRITON_INTERPRET", None)
    # the baseline is recorded with fusion; Triton 3.10 turns it off by default
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    # Triton's cache knows a kernel by less than its content
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"


def list_labels(provider: str) -> tuple[str, ...]:
    """Labels of all launches. Raises ProviderError."""
    labels = tuple(label for label, _ in _launches(provider, 90))
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ProviderError(f"{provider}: labels must be unique (given twice: {', '.join(twice)})")
    return labels


def triton_version() -> str:
    import triton

    return str(triton.__version__)


def settings() -> tuple[str, ...]:
    """Variables of this process that may change what the compiler makes of a kernel."""
    return settings_of_the_compiler(os.environ)


def compile_launch(
    provider: str, label: str, arch: int, recorded: Contents | None = None
) -> tuple[Compiled, ...]:
    """The kernels that the launch called `label` compiles for sm_`arch`, in launch order; a kernel
    that is launched twice appears twice. A kernel whose content is the one in `recorded` is not
    compiled. Raises ProviderError."""
    launch = dict(_launches(provider, arch)).get(label)
    if launch is None:
        raise ProviderError(f"{provider}: sm_{arch} has no launch {label!r}, unlike sm_90")
    from triton.runtime import driver

    driver.set_active(_Driver(arch))
    recorder = _Recorder(label, f"sm_{arch}", recorded or {})
    with recorder:
        try:
            launch()
        # host code that fails is a result, like a kernel that does not compile
        except Exception as error:
            host = Compiled("host", label, f"sm_{arch}", None, _first_cause(error))
            recorder.found.append(host)
    if not recorder.found:
        raise ProviderError(f"{provider}: {label!r} launches no kernel on sm_{arch}")
    return recorder.ordered()


def _launches(provider: str, arch: int) -> Launches:
    module, _, function = provider.partition(":")
    try:
        find: Callable[[int], Launches] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ProviderError(f"{provider}: cannot be imported: {error}") from error
    return find(arch)


class _Driver:
    """The part of Triton's driver that a launch asks, for a GPU that need not be present."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        # kernels are cached by device, so each target must be a device of its own
        return self._arch

    def get_current_stream(self, _: int) -> int:
        return 0


class _Unchanged(Exception):
    """Ends a compilation whose result is on record."""


class _Recorder:
    """Within its `with` block, launches only compile, and not even that where the content of the
    kernel is on record."""

    def __init__(self, label: str, arch: str, recorded: Contents) -> None:
        self._label, self._arch, self._recorded = label, arch, recorded
        # torch reads the environment, as Triton does
        from loragate.compile_leg.dependents import KernelOrder

        self._order = KernelOrder()
        self.found: list[Compiled] = []

    def __enter__(self) -> None:
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.compiler import ASTSource
        from triton.runtime import JITFunction

        self._run, self._make_ir = JITFunction.run, ASTSource.make_ir
        self._make_ttir = CUDABackend.make_ttir
        recorder = self

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            recorder.compile(kernel, args, options)

        def make_ir(source: Any, target: Any, options: Any, *rest: Any) -> Any:
            module = recorder._make_ir(source, target, options, *rest)
            recorder.content = content_of(module, options, target)
            return module

        def make_ttir(*args: Any, **options: Any) -> Any:
            module = recorder._make_ttir(*args, **options)
            recorder.look_at(str(module))
            return module

        JITFunction.run, ASTSource.make_ir = compile_only, make_ir
        CUDABackend.make_ttir = staticmethod(make_ttir)

    def __exit__(self, *_: object) -> None:
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.compiler import ASTSource
        from triton.runtime import JITFunction

        JITFunction.run, ASTSource.make_ir = self._run, self._make_ir
        CUDABackend.make_ttir = staticmethod(self._make_ttir)

    def look_at(self, ttir: str) -> None:
        """Called with each kernel on its way into the compiler."""
        self._order.add(*self._launch, ttir)
        if self.content and self.content == self._expected:
            raise _Unchanged

    def ordered(self) -> tuple[Compiled, ...]:
        """What was found, and of the last kernel what the order of all of them lacks."""
        *others, last = self.found
        return *others, replace(last, unordered="; ".join(self._order.flaws()))

    def compile(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        name = kernel.fn.__name__
        number = 1 + sum(1 for done in self.found if done.kernel == name)
        specialisation = self._label if number == 1 else f"{self._label}#{number}"
        self.content, self._expected = "", self._recorded.get((name, specialisation))
        self._launch = kernel, args, options
        resources, error, unchanged, unwritten = None, "", False, ""
        # what another launch has compiled in this process would never pass `look_at`
        kernel.device_caches.clear()
        try:
            # a warm-up compiles for the driver's target and launches nothing
            binary = self._run(kernel, *args, grid=(1,), warmup=True, **options)
            _check_tensor_memory(binary.metadata)
            unwritten = unwritten_registers(binary.asm["cubin"])
            resources = read_resources(binary.asm["cubin"], binary.metadata.shared)
        except _Unchanged:
            unchanged = True
        # any error of the compiler is the kernel's result
        except Exception as caught:
            error = _first_cause(caught)
        self.found.append(
            Compiled(
                kernel=name,
                specialisation=specialisation,
                arch=self._arch,
                resources=resources,
                error=error,
                content=self.content,
                unchanged=unchanged,
                unwritten=unwritten,
            )
        )


def _check_tensor_memory(metadata: Any) -> None:
    needed = getattr(metadata, "tmem_size", None) or 0
    if needed > _TENSOR_MEMORY_COLUMNS:
        limit = f"a block has at most {_TENSOR_MEMORY_COLUMNS}"
        raise RuntimeError(f"needs {needed} columns of tensor memory, {limit}")


def _first_cause(error: BaseException) -> str:
    """The innermost cause of a compiler error, with the line and column that Triton names; these
    are counted from the start of the kernel's source."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    places = (_PLACE.match(str(link)) for link in chain)
    place = next((found.group(0) for found in places if found), "")
    lines = [line.strip() for line in str(chain[-1]).splitlines() if line.strip()]
    return f"{place} {type(chain[-1]).__name__}: {lines[-1] if lines else ''}".strip()
