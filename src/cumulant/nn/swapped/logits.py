"""Logits that are not formed: query and key of q k^T, with what was done to it, for `inside`.

Shape legend: ... leading dimensions, Lq queries, Lk keys, D key width, E value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .masks import ABSENT, dense

PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}
SAME = {"to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone"}
SHAPES = {"view", "reshape"}
# What shares its numbers with what it is of, and may be written to in its place.
PARTS = {"transpose", "permute", "unsqueeze", "squeeze", "detach", "narrow", "select", "chunk", "split", "unbind"}
PARTS |= {"flatten", "unflatten", "swapaxes", "movedim", "diagonal", "unfold", "expand", "expand_as", "view_as"}
ALIASES = {"data", "T", "mT", "H", "mH", "real"}


class Weighted(NamedTuple):
    """Probabilities times values: attention, to be computed."""

    logits: Logits
    value: Tensor


class Logits:
    """q k^T (..., Lq, Lk) plus masks, or with `is_weights` its softmax over the keys; the query is scaled already.

    Masks are bool, True where a key takes part, or biases of the logits, of any shape that q k^T takes.
    """

    def __init__(self, query: Tensor, key: Tensor, masks: list[Tensor] | None = None) -> None:
        self.query, self.key, self.masks = query, key, list(masks or [])
        self.is_weights, self.dropout = False, 0.0
        self.fixed: Tensor | None = None  # numbers, once some of them were read or written by themselves
        self.viewed: Logits | None = None  # those that these are another shape of

    @property
    def shape(self) -> torch.Size:
        lead = torch.broadcast_shapes(self.query.shape[:-2], self.key.shape[:-2])
        return torch.Size((*lead, self.query.shape[-2], self.key.shape[-2]))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def device(self) -> torch.device:
        return self.query.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def but(self, **changed: Any) -> Logits:
        """A copy with other parts."""
        made = Logits(self.query, self.key, self.masks)
        made.__dict__.update({**self.__dict__, "viewed": None, **changed})
        return made

    def become(self, other: Logits | Tensor) -> Logits:
        """These same logits after they were changed in place: who holds them holds what came of it."""
        viewed = self.viewed
        self.__dict__.update(other.__dict__ if isinstance(other, Logits) else {"fixed": other})
        self.viewed = viewed
        if viewed is not None:
            viewed.become(_reshaped(self, viewed.shape) if self.fixed is None else self.fixed.view(viewed.shape))
        return self

    def weighed(self) -> Logits:
        return self.but(is_weights=True)

    def masked(self, mask: Tensor) -> Logits:
        return self.but(masks=[*self.masks, once(mask)])

    def actual(self) -> Tensor:
        """The numbers. Cost: Lq Lk D."""
        with torch._C.DisableTorchFunction():  # who watches would make logits of this product again
            return self._actual() if self.fixed is None else self.fixed

    def _actual(self) -> Tensor:
        A = self.query @ self.key.mT
        for mask in self.masks:
            A = A.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else A + mask
        if not self.is_weights:
            return A
        return torch.nn.functional.dropout(A.softmax(-1).nan_to_num(0.0), self.dropout, self.dropout > 0)

    def __getitem__(self, at: Any) -> Tensor:
        self.fixed = self.actual()
        return self.fixed[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self.fixed = self.actual()
        self.fixed[at] = value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Outside the module that made them, logits are numbers."""
        return func(*numbers(tuple(args)), **numbers(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        method = getattr(Tensor, name)
        if not callable(method):
            self.fixed = self.actual() if name in ALIASES else self.fixed
            return getattr(self.actual(), name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return _dispatch(method, (self, *args), kwargs)

        return call


def numbers(given: Any) -> Any:
    """Arguments with numbers in the place of logits, in lists too."""
    if isinstance(given, Logits):
        return given.actual()
    if isinstance(given, dict):
        return {name: numbers(x) for name, x in given.items()}
    return type(given)(map(numbers, given)) if type(given) in (tuple, list) else given


def found(given: Any) -> Logits | None:
    """The first logits among arguments, in lists too."""
    if isinstance(given, Logits):
        return given
    inner = given.values() if isinstance(given, dict) else given if type(given) in (tuple, list) else ()
    return next((one for one in map(found, inner) if one is not None), None)


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Hands the call to whoever watches, as torch does for functions of tensors."""
    return torch.overrides.handle_torch_function(func, (args[0],), *args, **kwargs)


def _operator(name: str) -> Any:
    def method(self: Logits, *args: Any) -> Any:
        return _dispatch(getattr(Tensor, name), (self, *args), {})

    return method


for _name in ("add", "radd", "mul", "rmul", "truediv", "matmul", "sub", "neg"):
    setattr(Logits, f"__{_name}__", _operator(f"__{_name}__"))


def _name_of(func: Any) -> str:
    """mul for __mul__, __rmul__, __imul__ and mul_."""
    name = getattr(func, "__name__", "").strip("_")
    for plain in ("add", "mul", "truediv", "matmul"):
        if name in (f"r{plain}", f"i{plain}"):
            return plain
    return name


def in_place(func: Any) -> bool:
    """Whether a function changes its first argument, as masked_fill_ does; often nobody takes what it returns."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def is_part(func: Any) -> bool:
    return getattr(func, "__name__", "") in PARTS


def product(func: Any, args: Any, kwargs: Any) -> Logits | None:
    """The logits that a product of two tensors may be, or None for another function."""
    name = _name_of(func)
    if name not in PRODUCTS or kwargs.get("out") is not None:
        return None
    if name == "einsum":
        return _einsum(args)
    if name == "baddbmm":
        bias = args[0]
        query, key = args[1:3] if len(args) > 2 else (kwargs["batch1"], kwargs["batch2"])
        scale, size = kwargs.get("alpha", 1), kwargs.get("beta", 1)
        # A sum that starts from zeros is a product: reading them costs less than making them did.
        return Logits(query * scale, key.mT, [bias * size] if size and bool(bias.any()) else [])
    first, second = args[0], args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("mat2"))
    tensors = isinstance(first, Tensor) and isinstance(second, Tensor) and min(first.ndim, second.ndim) >= 3
    return Logits(first, second.mT) if tensors and first.is_floating_point() else None


def _letters(args: Any) -> tuple[list[str], str] | None:
    """Letters of the two operands of an einsum, and of its result."""
    equation, operands = args[0], args[1] if len(args) == 2 else args[1:]
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(operands) != 2:
        return None
    given, result = equation.replace(" ", "").split("->")
    return given.split(","), result


def _einsum(args: Any) -> Logits | None:
    known, operands = _letters(args), args[1] if len(args) == 2 else args[1:]
    if known is None or not all(isinstance(x, Tensor) and x.ndim >= 3 for x in operands):
        return None
    (x, y), result = known
    width = [c for c in x if c in y and c not in result]
    lead, i, j = result[:-2], result[-2:-1], result[-1:]
    if (
        len(width) != 1
        or len(result) < 3
        or i in y
        or j in x
        or sorted(x) != sorted(lead + i + width[0])
        or len(x) != len(y)
    ):
        return None
    if sorted(y) != sorted(lead + j + width[0]):
        return None
    query = operands[0].permute([x.index(c) for c in lead + i + width[0]])
    return Logits(query, operands[1].permute([y.index(c) for c in lead + j + width[0]]))


def step(func: Any, args: Any, kwargs: Any) -> Any:
    """What a function makes of logits: logits, `Weighted`, or NotImplemented where only numbers would do."""
    name, first = _name_of(func), args[0]
    if name == "einsum":
        return _weighted_einsum(args)
    if not isinstance(first, Logits):
        if name in ("add", "mul") and len(args) > 1:
            return step(getattr(Tensor, name), (args[1], first), kwargs)
        if name == "where" and isinstance(args[1], Logits):
            return _filled(args[1], first, args[2])
        return NotImplemented
    if first.fixed is not None:
        return NotImplemented
    other = args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("value", kwargs.get("mat2")))
    if name in SAME:
        return first
    if name in SHAPES:
        return _reshaped(first, args[1:])
    if first.is_weights:
        if name == "dropout":
            p, training = kwargs.get("p", other), kwargs.get("training", args[2] if len(args) > 2 else True)
            return first.but(dropout=float(0.5 if p is None else p) if training else 0.0)
        if name in ("matmul", "bmm") and isinstance(other, Tensor) and other.ndim == first.ndim:
            return Weighted(first, other)
        return NotImplemented
    if name in ("softmax", "log_softmax"):
        dim = kwargs.get("dim", other)
        return first.weighed() if name == "softmax" and dim in (-1, first.ndim - 1) else NotImplemented
    if name == "masked_fill":
        return _filled(first, ~once(args[1]), args[2] if len(args) > 2 else kwargs["value"])
    if name == "add":
        return _added(first, other) if kwargs.get("alpha", 1) == 1 else NotImplemented
    if name in ("mul", "multiply"):
        return _scaled(first, other)
    if name in ("max", "maximum", "clamp") and _lowest(kwargs.get("min", other), first.dtype):
        return first if not {"max", "dim", "keepdim"} & set(kwargs) and len(args) <= 2 else NotImplemented
    if name in ("div", "truediv", "true_divide", "divide"):
        return _scaled(first, 1 / other)
    return NotImplemented


def _weighted_einsum(args: Any) -> Any:
    known, operands = _letters(args), args[1] if len(args) == 2 else args[1:]
    if known is None or not isinstance(operands[0], Logits) or not isinstance(operands[1], Tensor):
        return NotImplemented
    (x, y), result = known
    lead, i, j = x[:-2], x[-2], x[-1]
    width = [c for c in y if c not in x]
    if not operands[0].is_weights or len(width) != 1 or sorted(y) != sorted(lead + j + width[0]):
        return NotImplemented
    if sorted(result) != sorted(lead + i + width[0]):
        return NotImplemented
    value = operands[1].permute([y.index(c) for c in lead + j + width[0]])
    order = lead + i + width[0]
    return Weighted(operands[0], value), [order.index(c) for c in result]


def once(mask: Tensor) -> Tensor:
    """A mask without what was only expanded over sequences, heads and queries: it says the same of all of them."""
    for dim in range(mask.ndim - 1):
        mask = mask if mask.stride(dim) else mask.narrow(dim, 0, 1)
    return mask


def _filled(logits: Logits, taken: Tensor, value: Any) -> Any:
    """Logits where `taken`, elsewhere a value that has to mean absent."""
    number = value.flatten()[:1] if isinstance(value, Tensor) else value
    absent = isinstance(value, float | int) or value.numel() == 1
    if not absent or float(number) > ABSENT or taken.dtype != torch.bool:
        return NotImplemented
    return logits.masked(taken)


def _added(logits: Logits, mask: Any) -> Any:
    if isinstance(mask, float | int):
        return logits  # the same for all keys
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim == 3 < logits.ndim:
        mask = dense(mask, *logits.shape[-2:])  # one of ours, see `masks`
        return logits.masked(mask)
    floating = isinstance(mask, Tensor) and mask.is_floating_point()
    return logits.masked(mask) if floating and mask.ndim <= logits.ndim else NotImplemented


def _lowest(bound: Any, dtype: torch.dtype) -> bool:
    """Whether this is the least number of a dtype: what is absent by -inf, kept from below by it, is absent still."""
    if isinstance(bound, Tensor):
        return bound.numel() == 1 and bound.is_floating_point() and float(bound) <= torch.finfo(dtype).min
    return isinstance(bound, float) and bound <= torch.finfo(dtype).min


def _scaled(logits: Logits, factor: Any) -> Any:
    """A factor that is the same for all keys goes to the query, and to what was added before."""
    if isinstance(factor, Tensor) and factor.numel() > 1 and (factor.ndim < 2 or factor.shape[-2:] != (1, 1)):
        return NotImplemented
    masks = [mask if mask.dtype == torch.bool else mask * factor for mask in logits.masks]
    return logits.but(query=logits.query * factor, masks=masks)


def _reshaped(logits: Logits, sizes: Any) -> Any:
    """Other leading dimensions; queries and keys stay the last two."""
    shape = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    Lq, Lk = logits.shape[-2:]
    if len(shape) < 3 or shape[-1] not in (Lk, -1) or shape[-2] not in (Lq, -1) or shape[-2:].count(-1) == 2:
        return NotImplemented
    lead, old = shape[:-2], logits.shape[:-2]
    masks = [m.expand(*old, m.shape[-2] if m.ndim > 1 else 1, m.shape[-1]) for m in logits.masks]
    return logits.but(
        viewed=logits,
        query=logits.query.expand(*old, -1, -1).reshape(*lead, Lq, logits.query.shape[-1]),
        key=logits.key.expand(*old, -1, -1).reshape(*lead, Lk, logits.key.shape[-1]),
        masks=[m.reshape(*lead, *m.shape[-2:]) for m in masks],
    )
