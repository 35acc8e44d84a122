"""Work of Triton's interpreter that changes no result, and takes more than half of its time.

The interpreter runs a kernel operation by operation in Python. For each operation, call or launch
it works out anew what follows from a type, a shape or a module alone, and checks what it ignores.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from lorakernels.runtime.interpreter_operators import operators_of


def leave_out_repeated_work(interpreter: Any) -> None:
    """Patch `triton.runtime.interpreter`; once in a process."""
    _remember_builtins(interpreter)
    _remember_dtypes(interpreter)
    _patch_once(interpreter)
    _pass_what_is_on_the_host(interpreter)
    _leave_out_overflow(interpreter)
    _remember_blocks()
    _remember_tensors()
    _combine_by_xor_at_once(interpreter)


def _remember_builtins(interpreter: Any) -> None:
    """The interpreter replaces the builtins of a module or class by its own for a launch, and finds
    them among all members, which takes longer than the body of a small device function."""
    import triton.language as tl

    is_builtin = tl.core.is_builtin
    operators = operators_of(interpreter)

    @cache
    def names(owner: Any) -> tuple[str, ...]:
        return tuple(name for name, member in inspect.getmembers(owner) if is_builtin(member))

    def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        for name in names(owner):
            member = getattr(owner, name)
            # those that the launch around a device function has replaced are no builtins
            if not is_builtin(member):
                continue
            if owner is tl.tensor and name in operators:
                scope.set_attr(owner, name, operators[name])
            else:
                interpreter._patch_attr(owner, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def _remember_dtypes(interpreter: Any) -> None:
    """The interpreter makes its table of numpy's dtypes anew for each look at it."""
    import triton.language as tl

    find = interpreter._get_np_dtype
    of_scalar = cache(find)

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        # types of pointers have no hash, and are looked up without the table
        return find(scalar) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    interpreter._get_np_dtype = get_np_dtype


def _patch_once(interpreter: Any) -> None:
    """The interpreter patches the language for each call of a device function too, within a launch
    that has patched it already."""
    import triton.language as tl

    patch = interpreter._patch_lang

    @cache
    def languages(fn: Any) -> tuple[Any, ...]:
        return tuple(it for it in fn.__globals__.values() if it is tl or it is tl.core)

    def patch_lang(fn: Any) -> Any:
        seen = languages(fn)
        # outside a launch they are builtins
        if not seen or any(tl.core.is_builtin(language.load) for language in seen):
            return patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang


def _pass_what_is_on_the_host(interpreter: Any) -> None:
    """The interpreter takes the tensors of a launch to the host, and copies their memory back, also
    where they are there already. It holds that memory until the garbage collector runs, by a
    function that refers to itself, so that what a caller drops is not free as it is on a GPU."""
    from torch import Tensor

    executor = interpreter.GridExecutor
    take, give_back = executor._init_args_hst, executor._restore_args_dev

    def is_here(argument: Any) -> bool:
        if isinstance(argument, Tensor):
            return argument.is_cpu
        if isinstance(argument, tuple):
            return all(map(is_here, argument))
        # a wrapper of a tensor has its address, and a descriptor has a tensor
        return not (
            hasattr(argument, "data_ptr") or isinstance(argument, interpreter.TensorDescriptor)
        )

    def is_on_host(args: Any, kwargs: Any) -> bool:
        return all(map(is_here, (*args, *kwargs.values())))

    def init_args_hst(self: Any, args_dev: Any, kwargs: Any) -> Any:
        if is_on_host(args_dev, kwargs):
            return list(args_dev), dict(kwargs)
        return take(self, args_dev, kwargs)

    def restore_args_dev(
        self: Any, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any
    ) -> None:
        if not is_on_host(args_dev, kwargs):
            give_back(self, args_dev, args_hst, kwargs, kwargs_hst)

    executor._init_args_hst = init_args_hst
    executor._restore_args_dev = restore_args_dev


def _leave_out_overflow(interpreter: Any) -> None:
    """The interpreter computes each sum and product of integers once more in 64 bits, and asserts
    nothing about it: its assertions are off unless its options say `debug`."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _remember_blocks() -> None:
    """The type of a block checks its shape, and makes a name of it."""
    import triton.language as tl

    init = tl.block_type.__init__
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        # a size that is no int is refused, also where it equals one
        key = (type(shape), element_ty.name, *sizes, *map(type, sizes))
        known = seen.get(key)
        if known is not None:
            vars(self).update(known, element_ty=element_ty)
            return
        init(self, element_ty, shape)
        seen[key] = dict(vars(self))

    tl.block_type.__init__ = init_block


def _remember_tensors() -> None:
    """A value wraps each size of its type as a constexpr."""
    import triton.language as tl

    init = tl.tensor.__init__
    seen: dict[str, dict[str, Any]] = {}

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = seen.get(type.name)
        if known is not None:
            vars(self).update(known, handle=handle, type=type, dtype=type.scalar)
            return
        init(self, handle, type)
        seen[type.name] = vars(self) | {"handle": None}

    tl.tensor.__init__ = init_tensor


def _combine_by_xor_at_once(interpreter: Any) -> None:
    """`tl.sort` exchanges elements by sums of xor, which the interpreter takes element by
    element."""
    import triton.language as tl

    reduce = interpreter.ReduceOps
    apply = reduce.apply_impl

    def apply_impl(self: Any, values: Any) -> Any:
        if self.combine_fn != tl.standard._xor_combine:
            return apply(self, values)
        (value,) = values
        data = np.bitwise_xor.reduce(value.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, value.dtype)

    reduce.apply_impl = apply_impl
