"""What is not mutated, what only changes speed, and what shows on a GPU only. Pure.

Not mutated: annotations, docstrings, other texts, errors that are raised, imports, decorators and
`__all__`. A change there is no mistake in what the package computes.

Speed: the constants of `runtime/tuning.py`, options of a launch, and the numbers and conditions by
which a plan chooses its blocks. Any of them gives the same results by design.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from loragate.mutants.generation.text import Module, Span, within

_TUNING = "runtime/tuning.py"
_PLANS = ("dense/plan.py", "moe/delta/plan.py", "moe/layer/plan.py")
# functions of a plan whose numbers are part of a result, or sizes of memory
_EXACT = frozenset({"shrunk_shape", "plan_shrunk", "largest_shrunk", "ranks_of_all_slices"})
_LAUNCH_OPTIONS = frozenset(
    {
        "num_warps",
        "num_stages",
        "num_ctas",
        "eviction_policy",
        "cache_modifier",
        "STAGES",
        "EARLY",
        "trigger_early",
    }
)
_CHOICES = (ast.Constant, ast.Compare, ast.BoolOp, ast.IfExp, ast.If)
# synchronisation that the interpreter does not have
_GPU_CALLS = ("gdc_wait", "gdc_launch_dependents", "debug_barrier", "launch_options")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Module)


def left_out(module: Module) -> list[Span]:
    """Spans in which nothing is mutated."""
    return [span for node in ast.walk(module.tree) for span in _left_out_of(module, node)]


def _left_out_of(module: Module, node: ast.AST) -> Iterator[Span]:
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Raise)):
        yield module.span(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        yield module.span(node)
    elif isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
        yield module.span(node.annotation)
    elif isinstance(node, ast.Assign) and _names(node) & {"__all__"}:
        yield module.span(node)
    elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        yield module.span(node)
    if isinstance(node, _FUNCTIONS) and node.returns is not None:
        yield module.span(node.returns)
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        yield from (module.span(decorator) for decorator in node.decorator_list)
    if isinstance(node, ast.ClassDef):
        yield from (module.span(base) for base in node.bases)


def _names(node: ast.Assign) -> set[str]:
    return {target.id for target in node.targets if isinstance(target, ast.Name)}


def speed_only(module: Module) -> list[Span]:
    """Spans in which a change makes a kernel faster or slower and nothing else."""
    if module.path == _TUNING:
        return [(0, len(module.text))]
    spans = [
        module.span(node)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.keyword) and node.arg in _LAUNCH_OPTIONS
    ]
    if module.path in _PLANS:
        for function in ast.walk(module.tree):
            if isinstance(function, _FUNCTIONS) and function.name not in _EXACT:
                spans += [_choice(module, n) for n in ast.walk(function) if isinstance(n, _CHOICES)]
    return spans


def _choice(module: Module, node: ast.AST) -> Span:
    """The condition of a statement without its body, or a whole expression."""
    assert isinstance(node, (ast.expr, ast.If))
    return module.span(node.test if isinstance(node, ast.If) else node)


def gpu_only(module: Module) -> list[Span]:
    """Spans whose code does nothing in Triton's interpreter."""
    spans: list[Span] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.If) and "PDL" in ast.unparse(node.test):
            spans.append((module.span(node)[0], module.span(node.body[-1])[1]))
        elif isinstance(node, ast.Call) and _called(node) in _GPU_CALLS:
            spans.append(module.span(node))
    return spans


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def is_in(span: Span, spans: list[Span]) -> bool:
    return within(span, spans)


def scope_of(module: Module, node: ast.AST) -> ast.AST:
    """The innermost function, class or module around a node."""
    while not isinstance(node, _SCOPES):
        node = module.parents[node]
    return node
