"""What each operator makes of a piece of code, and what is left alone."""

from __future__ import annotations

import ast
import textwrap

import pytest

from loragate.core.checkout import project_root
from loragate.mutants.generation.sampling import candidates
from loragate.mutants.generation.scope import PLANS, gpu_only
from loragate.mutants.generation.subtle import OPERATORS, changes
from loragate.mutants.generation.text import Module, within
from loragate.mutants.model import Group

PACKAGE = project_root() / "kernels" / "lorakernels"

# operator, a statement of a kernel or of host code, one of the statements that it becomes
EXAMPLES = [
    ("mask-term", "m = a & b", "m = a"),
    ("mask-term", "m = a & b", "m = b"),
    ("condition-term", "ok = a and b and c", "ok = (a and c)"),
    ("edge", "m = rows < K", "m = rows <= K"),
    ("edge", "m = rows >= 0", "m = rows > 0"),
    ("bound", "n = list(range(K))", "n = list(range(K - 1))"),
    ("bound", "n = x[: a + b]", "n = x[: (a + b) - 1]"),
    ("swapped-arguments", "f(a.x, a.y, 1)", "f(a.y, a.x, 1)"),
    ("other-stride", "p = a * stride_m", "p = a * stride_k"),
    ("other-stride", "s = a.stride(0)", "s = a.stride(1)"),
    ("wide-cast", "p = a.to(tl.int64) * b", "p = a * b"),
    ("wide-cast", "p = tl.cast(a, tl.int64)", "p = a"),
    ("narrow-cast", "h = dot(a.to(b.dtype), b)", "h = dot(a, b)"),
    ("extra-rounding", "h = dot(a, b)", "h = (dot(a, b)).to(tl.bfloat16).to(tl.float32)"),
    ("other-tail", "x = tl.load(p, mask=m, other=0.0)", "x = tl.load(p, mask=m, other=1.0)"),
    ("other-tail", "x = tl.load(p, mask=m, other=-1)", "x = tl.load(p, mask=m, other=0)"),
    ("dropped-reset", "a.zero_()", "pass"),
    ("dropped-reset", "x = a.contiguous()", "x = a"),
    ("dropped-reset", "x = torch.zeros(3)", "x = torch.empty(3)"),
    ("first-index", "x = a[b]", "x = a[0]"),
    ("first-index", "p = a + slot * K", "p = a + (slot * 0) * K"),
    ("dropped-keyword", "x = tl.load(p, mask=m, other=0)", "x = tl.load(p, other=0)"),
    ("dropped-keyword", "x = f(dtype=a, b=c)", "x = f(b=c)"),
    ("extreme", "x = tl.minimum(a, b)", "x = tl.maximum(a, b)"),
    ("rounded-division", "n = tl.cdiv(a, b)", "n = (a // b)"),
    ("rounded-division", "n = -(-a // b)", "n = (a // b)"),
    ("rounded-division", "n = a // b", "n = ((a + b - 1) // b)"),
    ("one-branch", "x = a if c else b", "x = a"),
    ("one-branch", "x = a if c else b", "x = b if c else a"),
    ("dropped-not", "x = not a", "x = a"),
    ("dropped-statement", "a += b", "pass"),
    ("dropped-statement", "a.update(b)", "pass"),
    ("dropped-guard", "if a:\n    raise ValueError", "if False:\n    raise ValueError"),
    ("dropped-factor", "x = a * b", "x = a"),
]


def module_of(statement: str) -> Module:
    body = textwrap.indent(statement, "    ")
    return Module("m.py", f"@triton.jit\ndef f(a, stride_m, stride_k, K):\n{body}\n")


@pytest.mark.parametrize(("operator", "before", "after"), EXAMPLES)
def test_an_operator_makes_its_mistake(operator: str, before: str, after: str) -> None:
    module = module_of(before)
    made = [
        module.text[: change.span[0]] + change.new + module.text[change.span[1] :]
        for change in changes(module)
        if change.operator == operator
    ]
    assert module_of(after).text in made


@pytest.mark.parametrize("call", ["min(a, b)", "tl.maximum(a, b)", "math.gcd(a, b)"])
def test_arguments_whose_order_does_not_matter_are_not_exchanged(call: str) -> None:
    operators = {change.operator for change in changes(module_of(f"x = {call}"))}
    assert "swapped-arguments" not in operators


def test_every_operator_has_an_example() -> None:
    assert {operator for operator, _, _ in EXAMPLES} == set(OPERATORS)


def mutated_spans(text: str, path: str = "m.py") -> list[tuple[Group, str]]:
    return [(c.group, text[slice(*c.span)]) for c in candidates(Module(path, text))]


def test_texts_types_imports_and_decorators_are_left_alone() -> None:
    pytest.importorskip("cosmic_ray")
    text = textwrap.dedent(
        '''
        from a import b
        __all__ = ["x" + "y"]
        Either = A | B
        Any: TypeAlias = C | D | None

        @wrap(1 + 2)
        def f(x: A | B = 3, *, y: int = 13) -> A | None:
            """Text with 4 < 5."""
            limit: int | None = 6
            if x > 7:
                raise ValueError(f"{x + 8} is {9 + 10}", 11 + 12)
            return limit
        '''
    )
    found = {span for _, span in mutated_spans(text)}
    assert "3" in found
    assert {"x > 7", "7", "6"} <= found
    assert not any(sign in span for span in found for sign in ("|", "*", "1 + 2", "8", "11", "b"))


def test_what_only_changes_speed_is_counted_apart() -> None:
    pytest.importorskip("cosmic_ray")
    constants = mutated_spans("LIMIT = 3 + 4\n", "runtime/tuning.py")
    assert {group for group, _ in constants} == {Group.SPEED}
    launch = mutated_spans("k(a + 1, num_warps=8 + 1)\n")
    assert {span for group, span in launch if group is Group.SPEED} >= {"8", "8 + 1"}
    assert (Group.SUBTLE, "a + 1") in launch
    hint = mutated_spans("def f():\n    gdc_launch_dependents()\n    gdc_wait()\n")
    assert (Group.SUBTLE, "gdc_wait()") in hint
    assert {group for group, span in hint if "launch" in span} <= {Group.SPEED}
    plan = "def plan(shape):\n    block = 64 if shape.n > 9 else 128\n    return max(16, block)\n"
    found = mutated_spans(plan, "dense/plan.py")
    assert (Group.SUBTLE, "max") in found
    assert (Group.SPEED, "shape.n > 9") in found


@pytest.mark.parametrize("path", PLANS)
def test_what_a_plan_takes_from_its_own_folder_chooses_blocks_as_well(path: str) -> None:
    folder = path.rpartition("/")[0]
    package = f"lorakernels.{folder.replace('/', '.')}."
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    imported = (node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    own = [name.removeprefix(package) for name in imported if name.startswith(package)]
    assert {f"{folder}/{name}.py" for name in own} <= PLANS.keys()


def test_neither_a_barrier_nor_a_wait_for_other_kernels_needs_a_gpu() -> None:
    module = Module("m.py", "def f():\n    tl.debug_barrier()\n    gdc_wait()\n    a.wait()\n")
    needed = {change.span: within(change.span, gpu_only(module)) for change in changes(module)}
    by_text = {module.text[slice(*span)]: gpu for span, gpu in needed.items()}
    assert by_text == {"tl.debug_barrier()": False, "gdc_wait()": False, "a.wait()": False}


def test_the_device_of_a_tensor_that_is_left_to_torch_needs_a_gpu() -> None:
    module = Module("m.py", 'f(n, dtype=d, device=x.device)\ng(device="cpu", dim=1)\n')
    gpu = gpu_only(module)
    needed = {
        module.text[slice(*change.span)]: within(change.span, gpu)
        for change in changes(module)
        if change.operator == "dropped-keyword"
    }
    assert needed == {
        ", dtype=d": False,
        ", device=x.device": True,
        'device="cpu", ': False,
        ", dim=1": False,
    }


def test_what_a_library_operator_finds_but_cannot_change_is_left_out() -> None:
    module = module_of("try:\n    pass\nexcept (re.error, ValueError):\n    pass")
    texts = [
        candidate.make()
        for candidate in candidates(module)
        if "ExceptionReplacer" in candidate.operator
    ]
    assert texts
    assert None in texts
