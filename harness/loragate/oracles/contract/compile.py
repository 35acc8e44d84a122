"""One artifact for any number of identical layers and any mix of adapters, and operators that
keep their declared contract.

Several layers, each with its own adapters, are run through torch.compile, batch after batch. All
of them must share one traced graph, and all other batch sizes a second one: a layer's name or the
number of active adapters in a graph gives each layer or batch its own graph (vllm #34119, #38152),
and the server compiles while it serves. Every custom operator that a step calls
passes opcheck; on a GPU no kernel is compiled after the first batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.kernel_compiles import kernels_compiled
from loragate.execution.session import base_of, open_loaded
from loragate.inputs import DataKind, copy_batch, make_batch, make_pool
from loragate.matrix.case import Case, Execution, Mix
from loragate.oracles.evidence import DEVICE_ERRORS, judge_bits, passed
from loragate.protocol import (
    AnyInstance,
    Batch,
    CheckedInstance,
    Trial,
    apply_step,
    subject_code,
)

_KIND = DataKind.EXACT
_LAYERS = 3
# all adapters, none, one: whatever depends on their number changes with each mix
_MIXES = (Mix.RAGGED, Mix.ALL_BASE, Mix.SINGLE)
_WARM_UP = (Mix.RAGGED, Mix.ALL_BASE)
# the schema is checked by comparing operands before and after a call, which torch cannot in 8 bits
_OPCHECKS_OF_8_BITS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
_OPCHECKS = ("test_schema", *_OPCHECKS_OF_8_BITS)
# namespaces of torch's own operators, which are not checked
_TORCH = frozenset({"aten", "prim", "prims"})


class Compile:
    name = OracleName.COMPILE

    def applies(self, trial: Trial) -> str | None:
        if trial.case.execution is not Execution.EAGER:
            return "torch.compile is judged in eager execution only"
        if not trial.case.tokens:
            return "the batch has no rows"
        traceable = trial.capabilities.traceable
        if traceable is not None:
            with subject_code():
                if traceable(trial.case):
                    return None
        return "the subject does not promise that torch.compile can trace it"

    def judge(self, trial: Trial) -> Judgement:
        layers = [_open(trial, number) for number in range(_LAYERS)]
        calls = _custom_calls(layers[0], _batch(trial, 0))
        wrong = _opcheck(calls)
        if wrong is not None:
            return wrong
        compiled = _Compiled(trial)
        wrong = _trace(trial, layers, compiled)
        if wrong is not None:
            return wrong
        figures = {"operators": len(calls), "layers": _LAYERS, "graphs": compiled.graphs}
        return passed(self.name, **{name: float(count) for name, count in figures.items()})


def _open(trial: Trial, number: int) -> CheckedInstance:
    """A layer with its own adapters."""
    case, machine, base = trial.case, trial.machine, base_of(trial, _KIND)
    pool = make_pool(case, trial.seed + number, _KIND, machine, trial.capabilities)
    return open_loaded(trial, case, base=base, pool=pool)


def _batch(trial: Trial, step: int, tokens: int | None = None) -> Batch:
    tokens = trial.case.tokens if tokens is None else tokens
    case = replace(trial.case, mix=_MIXES[step], tokens=tokens)
    return make_batch(case, trial.seed, step, _KIND, trial.machine)


@dataclass(frozen=True, slots=True)
class _Call:
    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def has_8_bits(self) -> bool:
        return any(
            isinstance(operand, Tensor)
            and operand.dtype.is_floating_point
            and operand.dtype.itemsize == 1
            for operand in tree_leaves((self.args, self.kwargs))
        )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The first call of each operator that is not torch's own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, _Call] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace not in _TORCH:
            self.calls.setdefault(str(func), _Call(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _custom_calls(instance: CheckedInstance, batch: Batch) -> tuple[_Call, ...]:
    instance.prepare(batch.token_slots)
    with _Recorder() as recorder:
        apply_step(instance, batch)
    return tuple(recorder.calls.values())


def _opcheck(calls: tuple[_Call, ...]) -> Judgement | None:
    for call in calls:
        tests = _OPCHECKS_OF_8_BITS if call.has_8_bits else _OPCHECKS
        try:
            torch.library.opcheck(call.operator, call.args, call.kwargs, test_utils=tests)
        except DEVICE_ERRORS:
            raise
        # opcheck has no error type of its own
        except Exception as error:
            return _failure(Failure.WRONG_ANSWER, f"opcheck of {call.operator}: {_first(error)}")
    return None


def _trace(trial: Trial, layers: list[CheckedInstance], compiled: _Compiled) -> Judgement | None:
    """A FAIL if a layer, mix or size needs its own graph, or if a graph gives other results;
    INCONCLUSIVE if there is no graph at all."""
    try:
        for number, mix in enumerate(_MIXES):
            batch = _batch(trial, number)
            for index, layer in enumerate(layers):
                where = f"layer {index} of {_LAYERS} with a batch of {mix}"
                # a server warms up steps with adapters and steps without them, which may leave
                # the kernels of adapters out
                warm = index > 0 or mix not in _WARM_UP
                wrong = compiled.step(layer, batch, where, graphs=1, warm=warm)
                if wrong is not None:
                    return wrong
        for tokens in _other_sizes(trial.case):
            batch = _batch(trial, 0, tokens)
            where = f"a batch of {tokens} rows after one of {trial.case.tokens}"
            # torch.compile treats a size as a constant until it sees another one
            wrong = compiled.step(layers[0], batch, where, graphs=2, warm=False)
            if wrong is not None:
                return wrong
    except torch._dynamo.exc.TorchDynamoException as error:
        return _failure(Failure.RECOMPILED, f"cannot be traced as one graph: {_first(error)}")
    finally:
        torch._dynamo.reset()
    return None


def _other_sizes(case: Case) -> range:
    """Smaller batches; torch.compile always treats a size of one as a constant. Where x has one
    more dimension, batches of odd and of even numbers are cut into different numbers of parts."""
    step = case.input_dims - 1
    return range(case.tokens - step, max(1, case.tokens - 4 * step), -step)


class _Compiled:
    """One function under torch.compile that runs any layer, and the graphs traced from it."""

    def __init__(self, trial: Trial) -> None:
        def run(layer: AnyInstance, batch: Batch) -> Tensor:
            return apply_step(layer, batch)

        torch._dynamo.reset()
        self._trial = trial
        self._graphs: list[torch.fx.GraphModule] = []
        self._run = torch.compile(run, backend=self._keep, fullgraph=True)

    @property
    def graphs(self) -> int:
        return len(self._graphs)

    def step(
        self, layer: CheckedInstance, batch: Batch, where: str, *, graphs: int, warm: bool
    ) -> Judgement | None:
        """A FAIL if there are more than `graphs` graphs now, or Triton compiles while `warm`.
        INCONCLUSIVE if there are none."""
        kernels: list[str] = []
        own = copy_batch(batch)
        with kernels_compiled(kernels):
            layer.prepare(batch.token_slots)
            wanted = apply_step(layer, copy_batch(batch)) + 0.0
            # what is traced is the subject's alone
            result = layer.run(lambda instance: self._run(instance, own), own.out) + 0.0
        if warm and kernels:
            return _failure(
                Failure.RECOMPILED, f"{where} compiled {', '.join(kernels)} after warm-up"
            )
        if not self._graphs:
            # where torch.compile is disabled it silently runs the layer eagerly
            message = f"{where}: torch.compile traced nothing (is TORCHDYNAMO_DISABLE set?)"
            return Judgement(OracleName.COMPILE, Verdict.INCONCLUSIVE, message=message)
        if len(self._graphs) > graphs:
            return _failure(Failure.RECOMPILED, f"{where}: {_difference(*self._graphs[-2:])}")
        return _compare(self._trial, batch, result, wanted)

    def _keep(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self._graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def _compare(trial: Trial, batch: Batch, result: Tensor, wanted: Tensor) -> Judgement | None:
    return judge_bits(
        trial,
        batch,
        result,
        wanted,
        oracle=OracleName.COMPILE,
        failure=Failure.WRONG_ANSWER,
        claim="the same layer without torch.compile",
    )


def _difference(one: torch.fx.GraphModule, other: torch.fx.GraphModule) -> str:
    """The first line in which two graphs differ that should be one."""
    lines, others = (str(graph.graph).splitlines() for graph in (one, other))
    for line, counterpart in zip(lines, others, strict=False):
        if line != counterpart:
            return f"another graph, with {counterpart.strip()!r} for {line.strip()!r}"
    return "another graph of the same text: the guards of the first one failed"


def _first(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


def _failure(kind: Failure, message: str) -> Judgement:
    return Judgement(OracleName.COMPILE, Verdict.FAIL, kind, message)
