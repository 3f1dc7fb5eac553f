"""Attention over a stream of tokens, in constant time and memory per token: all of it, or a sliding window.

Shape legend: ... leading dimensions, H key heads, G query heads for each, L tokens appended at once, D, E widths.

A stream that only grows is a `Moments` and its `merge`; `Stream` keeps that state in place for decoding. A window
also takes the oldest tokens out again, by `remove`; each removal leaves a little rounding behind, which would add up
over a long stream. So the window keeps its tokens and builds the state from them afresh once every `window`
tokens: still constant cost per token, and the rounding of at most `window` removals instead of all. Sums are kept in
float64, since those of float32 lose a digit in ten thousand steps; a GPU, whose step is the reading of its state,
keeps float32 sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .call import check_order, check_scale, whole
from .held import Held, check_step, check_tokens
from .kernels import launch
from .moments import Moments, statistics_dtype


class Stream:
    """All tokens so far, for decoding: one state, updated in place; no gradients.

        stream = Stream(order=2)
        stream.append(k, v)                             # a prompt, (..., H, L, D) and (..., H, L, E)
        out = stream.step(q, k_next, v_next)            # one token of each: (..., G H, 1, E)

    `step` takes the token in and answers the query, which sees it: the row that causal attention gives. On a GPU
    this is one kernel that reads and writes the state once: 8 D E bytes a head at order 2, twice that at order 3; it
    takes tokens (B, H, 1, D), others go through plain torch.
    """

    def __init__(self, *, order: int = 3, full: bool = False, scale: float | None = None) -> None:
        check_order(order, full)
        check_scale(scale)
        self.order, self.full, self.scale = order, full, scale
        self.state: Moments | None = None

    @property
    def held(self) -> Held | None:
        return None if self.state is None else held_by(self.state)

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        """Takes in key (..., H, L, D) and value (..., H, L, E). What one sequence holds may go on as several."""
        check_tokens(key, value, self.held, grow=True)
        kernel = self.order > 1 and not self.full and launch.available(key)
        new = _moments(key, value, self.order, self.full, kernel)
        merged = new if self.state is None else self.state.merge(new)
        self.state = Moments._make(None if x is None else x.contiguous() for x in merged)

    @torch.no_grad()
    def step(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Takes in one token, key (..., H, 1, D) and value (..., H, 1, E), and answers query (..., G H, 1, D).

        `scale` is the stream's, D**-0.5 unless given.
        """
        check_scale(scale)
        check_step(query, key, value, self.held, grow=True)
        scale = self.scale if scale is None else scale
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if self.state is None:
            self.append(key[..., :0, :], value[..., :0, :])
        assert self.state is not None
        if key.ndim == 4 and _kernel_takes(self.state, key, value):
            from .kernels.dense import decode as triton_decode

            return triton_decode.step(self.state, query, key, value, scale)
        self.append(key, value)
        # The query heads of a key head are its rows.
        grouped = query.unflatten(-3, (key.shape[-3], -1)).flatten(-3, -2)
        return self.state.apply(grouped, scale).reshape(*query.shape[:-1], value.shape[-1])


def held_by(state: Moments) -> Held:
    return Held(state.weight.shape, *state.widths, state.weight.dtype, state.weight.device)


class SlidingWindow:
    """The last `window` tokens of a stream.

        window = SlidingWindow(1024)
        for q, k, v in stream:              # (..., 1, D), (..., 1, D), (..., 1, E)
            window.append(k, v)
            out = window.apply(q)

    Cost per token: two merges and a share of a rebuild, D E each; memory: `window` tokens and one state.
    """

    def __init__(self, window: int, *, order: int = 3, full: bool = False) -> None:
        check_order(order, full)
        if not whole(window, 1):
            raise ValueError(f"window must be a number of tokens, at least 1, got {window!r}")
        self.window, self.order, self.full = window, order, full
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.state: Moments | None = None
        self._since_rebuild = 0

    def append(self, key: Tensor, value: Tensor) -> None:
        """Takes in key (..., L, D) and value (..., L, E) and lets go of what falls out of the window."""
        check_tokens(key, value, None if self.state is None else held_by(self.state), heads=False)
        L = key.shape[-2]
        if self.key is None or self.value is None or self.state is None:
            self.key, self.value, self.state = (
                key[..., :0, :],
                value[..., :0, :],
                self._of(key[..., :0, :], value[..., :0, :]),
            )
        excess = max(0, self.key.shape[-2] + L - self.window)
        leaving = min(excess, self.key.shape[-2])
        old = self.key[..., :leaving, :], self.value[..., :leaving, :]
        self.key = torch.cat((self.key[..., leaving:, :], key), -2)[..., -self.window :, :]
        self.value = torch.cat((self.value[..., leaving:, :], value), -2)[..., -self.window :, :]
        self._since_rebuild += leaving
        if self._since_rebuild >= self.window or self.window < L:
            self.state, self._since_rebuild = self._of(self.key, self.value), 0
            return
        if leaving:
            self.state = self.state.remove(self._of(*old))
        self.state = self.state.merge(self._of(key, value))

    def apply(self, query: Tensor, scale: float | None = None) -> Tensor:
        """Attention of query (..., Q, D) over the window."""
        if self.state is None:
            raise ValueError("the window has seen no token yet: append one before apply")
        return self.state.apply(query, scale)

    def _of(self, key: Tensor, value: Tensor) -> Moments:
        return _moments(key, value, self.order, self.full)


def _moments(key: Tensor, value: Tensor, order: int, full: bool, kernel: bool = False) -> Moments:
    """Moments whose sums go on in float64; with `kernel` as that of a step keeps them."""
    moments = Moments.of(key, value, order=order, full=full)
    if kernel or key.device.type == "mps":
        return moments
    S, P, T = (None if x is None else x.double() for x in moments[3:])
    return moments._replace(S=S, P=P, T=T)


def _kernel_takes(state: Moments, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel of a step has this order, and the state the layout that it takes for granted.

    A state that serves a larger batch, or that a user has put here, may not; plain torch then brings it there.
    """
    S = state.S
    return (
        S is not None
        and not state.full
        and launch.available(key)
        and S.shape == (*key.shape[:2], key.shape[-1], value.shape[-1])
        and S.dtype == statistics_dtype(key.dtype)
        and max(S.shape[-2:]) <= launch.WIDEST
        and all(x is None or x.is_contiguous() for x in state)
    )
