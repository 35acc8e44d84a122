"""The kinds of benchmark: their rows, how they run, and how their records are shown.

Invariant: a kind is looked up without torch. What needs a device is named `module:function`, and
imported when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

from loragate.bench.asked import Asked, dense_asked, moe_asked
from loragate.bench.bars import Bar
from loragate.bench.engine_figures import EngineFigures
from loragate.bench.engine_rows import engine_rows
from loragate.bench.engine_tables import render_markdown as engine_markdown
from loragate.bench.engine_tables import render_terminal as engine_terminal
from loragate.bench.figures import DenseFigures
from loragate.bench.graphs_figures import GraphFigures
from loragate.bench.graphs_rows import ReplayRow, graph_rows
from loragate.bench.graphs_tables import render_markdown as graphs_markdown
from loragate.bench.graphs_tables import render_terminal as graphs_terminal
from loragate.bench.moe_figures import MoEFigures
from loragate.bench.moe_rows import TOKENS as MOE_TOKENS
from loragate.bench.moe_rows import moe_rows
from loragate.bench.moe_tables import render_markdown as moe_markdown
from loragate.bench.moe_tables import render_terminal as moe_terminal
from loragate.bench.rows import BASE, BEHIND_BASE, TOKENS, dense_rows
from loragate.bench.select import Row
from loragate.bench.streams_figures import StreamFigures
from loragate.bench.streams_rows import SEED, stream_rows
from loragate.bench.streams_tables import render_markdown as streams_markdown
from loragate.bench.streams_tables import render_terminal as streams_terminal
from loragate.bench.tables import render_markdown as dense_markdown
from loragate.bench.tables import render_terminal as dense_terminal
from loragate.core.gpus import GPU_BUDGET_BYTES

if TYPE_CHECKING:
    from loragate.bench.compiling import Measure
    from loragate.bench.contender import Contender
    from loragate.core.machine import Machine

Progress = Callable[[str], None]


class Figures(Protocol):
    @property
    def complete(self) -> bool:
        """Whether every row of the table was measured."""

    def bars(self) -> tuple[Bar, ...]: ...

    def payload(self) -> dict[str, Any]: ...


class Run(Protocol):
    def __call__(
        self,
        candidate: Contender,
        baseline: Contender | None,
        rows: Sequence[Any],
        machine: Machine,
        progress: Progress,
    ) -> Figures: ...


def _every(row: Row) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    help: str
    # False: it times parts that the interface of subjects does not expose, of lorakernels and vllm
    takes_any_subject: bool
    # its section in a results file
    section: str
    # called with a seed where there is a default seed, otherwise without arguments
    rows: Callable[..., Sequence[Row]]
    # an example of a pattern for --rows
    pattern: str
    # "module:function" of a `Run`
    target: str
    read: Callable[[Mapping[str, Any]], Any]
    terminal: Callable[[Any], str]
    markdown: Callable[[Any], str]
    # whether rows are compared with a baseline
    has_baseline: bool = True
    # some of its rows are drawn from a seed
    default_seed: int | None = None
    # the rows that a user asks for in place of the table; None if the table is all there is
    asked: Callable[[Asked], Sequence[Row]] | None = None
    # how such a row is written
    shape: str = ""
    # "module:function" of a `Measure`, by which two builds are compared; None if they cannot be
    measure_target: str | None = None
    # whether two builds are compared by a row
    compares: Callable[[Any], bool] = _every
    # memory that a process needs which measures its rows, references included
    process_bytes: int = 2 * GPU_BUDGET_BYTES
    # of the calls that are compared, which have a part that is no code of lorakernels, by its name
    controls: Mapping[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Run:
        return cast(Run, _imported(self.target))

    @property
    def measure(self) -> Measure:
        assert self.measure_target is not None, "two builds cannot be compared by this kind"
        return cast("Measure", _imported(self.measure_target))


def _imported(target: str) -> object:
    module, _, name = target.partition(":")
    function: object = getattr(import_module(module), name)
    return function


_ALL = (
    Kind(
        name="dense",
        help="what LoRA adds to the base GEMM of dense layers",
        takes_any_subject=True,
        section="bench_dense",
        rows=dense_rows,
        asked=partial(dense_asked, tokens=TOKENS),
        shape="8192x1024+128+128",
        pattern="qkv.m*.r16",
        target="loragate.bench.dense:run_dense",
        measure_target="loragate.bench.dense:measure",
        process_bytes=GPU_BUDGET_BYTES // 2,
        controls={BEHIND_BASE: BASE},
        read=DenseFigures.from_payload,
        terminal=dense_terminal,
        markdown=dense_markdown,
    ),
    Kind(
        name="moe",
        help="MoE LoRA: the delta path by path, alignment, a whole layer",
        takes_any_subject=False,
        section="bench_moe",
        rows=moe_rows,
        asked=partial(moe_asked, tokens=MOE_TOKENS),
        shape="2048x768+768/128/8",
        pattern="mixtral.m*.r16",
        target="loragate.bench.moe:run_moe",
        measure_target="loragate.bench.moe:measure",
        read=MoEFigures.from_payload,
        terminal=moe_terminal,
        markdown=moe_markdown,
    ),
    Kind(
        name="streams",
        help="layers on one stream and on several: linear layers, gated delta nets",
        takes_any_subject=False,
        section="bench_streams",
        rows=stream_rows,
        pattern="drawn.*",
        target="loragate.bench.streams:run_streams",
        measure_target="loragate.bench.streams:measure",
        read=StreamFigures.from_payload,
        terminal=streams_terminal,
        markdown=streams_markdown,
        default_seed=SEED,
    ),
    Kind(
        name="graphs",
        help="decode steps replayed from CUDA graphs: device, host and memory",
        takes_any_subject=False,
        section="bench_graphs",
        has_baseline=False,
        rows=graph_rows,
        pattern="replay.qwen3_8b.*",
        target="loragate.bench.graphs:run_graphs",
        measure_target="loragate.bench.graphs:measure",
        compares=lambda row: isinstance(row, ReplayRow),
        read=GraphFigures.from_payload,
        terminal=graphs_terminal,
        markdown=graphs_markdown,
    ),
    Kind(
        name="engine",
        help="whole engines of vLLM: without adapters, with its kernels, with the plug-in",
        takes_any_subject=False,
        section="bench_engine",
        rows=engine_rows,
        pattern="qwen3_8b.decode.*",
        target="loragate.bench.engine:run_engine",
        read=EngineFigures.from_payload,
        terminal=engine_terminal,
        markdown=engine_markdown,
    ),
)
KINDS = MappingProxyType({kind.name: kind for kind in _ALL})
