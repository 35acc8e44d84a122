"""What is not mutated, what only changes speed, and what shows on a GPU only. Pure.

Not mutated: annotations, names of types, docstrings, other texts, errors that are raised, imports,
decorators and `__all__`. A change there is no mistake in what the package computes.

Speed: the constants of `runtime/tuning.py`, options of a launch, and the numbers and conditions by
which a plan chooses its blocks. Any of them gives the same results by design.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from loragate.mutants.generation.syntax import with_comma
from loragate.mutants.generation.text import Module, Span

_TUNING, _DEVICE = "runtime/tuning.py", "runtime/device.py"
# modules that choose blocks, and what of them is part of a result or the size of some memory
PLANS: Mapping[str, frozenset[str]] = {
    "dense/plan.py": frozenset(),
    "dense/expand_plan.py": frozenset(),
    "dense/shape.py": frozenset({"ranks_of_all_slices"}),
    "dense/few_rows.py": frozenset(),
    "dense/one_wave.py": frozenset(),
    "dense/prefill.py": frozenset(),
    "dense/registers.py": frozenset(),
    "moe/delta/plan.py": frozenset({"plan_path", "ranks_of_all_slices"}),
    "moe/layer/plan.py": frozenset({"fold_ranks"}),
    "moe/tiles.py": frozenset({"max_tiles", "num_bins", "slot_bins"}),
}
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
_CHOICES = (ast.Constant, ast.Compare, ast.BinOp, ast.BoolOp, ast.IfExp, ast.If)
# of options of a launch, which neither the interpreter nor the compile leg looks at
_GPU_CALL = "launch_options"
# whenever it comes, what needs the kernels before it waits for them
_HINT = "gdc_launch_dependents"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def left_out(module: Module) -> list[Span]:
    """Spans in which nothing is mutated."""
    return [span for node in ast.walk(module.tree) for span in _left_out_of(module, node)]


def _left_out_of(module: Module, node: ast.AST) -> Iterator[Span]:
    if isinstance(node, (ast.expr, ast.stmt)) and _is_left_out(module, node):
        yield module.span(node)
    elif isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
        yield module.span(node.annotation)
    if isinstance(node, _FUNCTIONS) and node.returns is not None:
        yield module.span(node.returns)
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        for decorator in node.decorator_list:
            start, end = module.span(decorator)
            # with the sign before it and the end of its line
            yield start - 1, end + 1
    if isinstance(node, ast.ClassDef):
        yield from (module.span(base) for base in node.bases)
    if isinstance(node, _FUNCTIONS) and node.args.kwonlyargs and node.args.vararg is None:
        yield _star(module, node.args)


def _star(module: Module, arguments: ast.arguments) -> Span:
    """The sign behind which arguments have names, for which an operator would take it."""
    first = module.span(arguments.kwonlyargs[0])[0]
    at = module.text.rindex("*", 0, first)
    return at, at + 1


def _is_left_out(module: Module, node: ast.expr | ast.stmt) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (str, bytes))
    if isinstance(node, ast.Assign):
        return _is_type(module, node) or "__all__" in _names(node)
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.annotation) == "TypeAlias"
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Raise))


def _is_type(module: Module, node: ast.Assign) -> bool:
    """Whether a name is given to a union of types."""
    of_module = isinstance(module.parents[node], ast.Module)
    union = isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.BitOr)
    return of_module and (union or isinstance(node.value, ast.Subscript))


def _names(node: ast.Assign) -> set[str]:
    return {target.id for target in node.targets if isinstance(target, ast.Name)}


def speed_only(module: Module) -> list[Span]:
    """Spans in which a change makes a kernel faster or slower and nothing else."""
    if module.path == _TUNING:
        return [(0, len(module.text))]
    spans = [
        module.span(node)
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.keyword) and node.arg in _LAUNCH_OPTIONS)
        or (isinstance(node, ast.Call) and _called(node) == _HINT)
    ]
    if module.path in PLANS:
        exact = PLANS[module.path]
        for function in ast.walk(module.tree):
            if isinstance(function, _FUNCTIONS) and function.name not in exact:
                spans += [_choice(module, n) for n in ast.walk(function) if isinstance(n, _CHOICES)]
    return spans


def _choice(module: Module, node: ast.AST) -> Span:
    """The condition of a statement without its body, or a whole expression."""
    assert isinstance(node, (ast.expr, ast.If))
    return module.span(node.test if isinstance(node, ast.If) else node)


def gpu_only(module: Module) -> list[Span]:
    """Spans whose code does nothing in Triton's interpreter, and arguments that say where a tensor
    is: without a GPU there is one device, which is torch's default within every operator."""
    if module.path == _DEVICE:
        return [(0, len(module.text))]
    spans: list[Span] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and _called(node) == _GPU_CALL:
            spans.append(module.span(node))
        elif isinstance(node, ast.keyword) and _names_device(node):
            spans.append(with_comma(module, module.span(node)))
    return spans


def _names_device(keyword: ast.keyword) -> bool:
    return keyword.arg == "device" and not isinstance(keyword.value, ast.Constant)


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]
