"""Agent attention: a few agents, pooled from the queries, gather from all keys; every query reads from the agents.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D, E widths, n agents, p prefix tokens.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import Call, Grid, expands_to
from ..tensors import ABSENT, log_weights, nothing, repeat_heads, wide
from .fused import fused_softmax
from .grid import GridConv, resolve_grid
from .mixing import Mixer
from .products import multiplies_narrow, one_hot_weights, pair_products, product, written_down
from .registry import can, register

AGENTS = 49
SOFT = {"read_exponent": 0.3, "residual": 0.075}  # what AgentSD has in place of parameters
TABLE = 7  # side of the bias tables that are resized to the grid


def agent_attention(
    call: Call,
    *,
    agents: int | tuple[int, ...] = AGENTS,
    key_bias: Tensor | None = None,
    query_bias: Tensor | None = None,
    read_exponent: float = 1.0,
    residual: float = 0.0,
    training_free: bool = False,
) -> Tensor:
    """out = softmax_agents(scale^e q A^T + b2) softmax_keys(scale A k^T + b1) v + r v,  A = adaptive mean pooling of q.

    A (n agents) is pooled over the grid (rows, cols) of the queries, the first `prefix` left out, or over the sequence
    where there is no `grid`. `agents` is a square number on a grid, or its shape, e.g. (7, 7); for clips (frames, rows,
    cols) an integer pools all frames together. b1 = `key_bias` (H, n, Lk), b2 = `query_bias` (H, Lq, n).
    Queries that the query mask leaves out are not pooled, and bins without a query have no agent. A row without any key
    gives 0.
    e = `read_exponent` and r = `residual` are 1 and 0; 0.3 and 0.075 are AgentSD's for trained softmax layers (which
    also takes merged tokens as agents, and merges tokens: not here). `training_free=True` is their old name.
    Cost: (Lq + Lk) n (D + E); both steps are PyTorch's scaled_dot_product_attention, or plain products where a GPU
    trains in bfloat16.
    """
    key, value, scale, dropout_p = call.key, call.value, call.softmax_scale, call.dropout_p
    queries, keys = call.query.shape[-2], key.shape[-2]
    read_exponent, residual = _softer(read_exponent, residual, training_free)
    if residual and queries != keys:
        raise ValueError(
            f"residual={residual} adds the values to the output: it needs as many queries as keys, got {queries} and "
            f"{keys}"
        )
    if read_exponent != 1 and not scale > 0:
        raise ValueError(f"read_exponent={read_exponent} is a power of the scale, which must be positive, got {scale}")
    if 0 in call.query.shape[:-1] or 0 in key.shape[:-1]:
        return nothing((*call.query.shape[:-1], value.shape[-1]), *call[:4])
    query, present = call.present_queries()
    A, absent = pool_agents(query, agents, call.grid, call.prefix, present)
    for name, bias, sides in (("key_bias", key_bias, (A, key)), ("query_bias", query_bias, (query, A))):
        wanted = (*query.shape[:-2], *(x.shape[-2] for x in sides))
        if bias is not None and not expands_to(bias, wanted):
            raise ValueError(f"{name} must broadcast to {wanted}, got {tuple(bias.shape)}")
    gathered = _attend(A, key, value, scale, key_bias, log_weights(call.key_mask, key), dropout_p)
    out = _attend(query, A, gathered, scale**read_exponent, query_bias, absent, dropout_p)
    return out + residual * repeat_heads(value, out.shape[-3]) if residual else out


def _softer(read_exponent: float, residual: float, training_free: bool) -> tuple[float, float]:
    """Exponent and residual as given, or those that `training_free` stands for."""
    for name, number in (("read_exponent", read_exponent), ("residual", residual)):
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"{name} must be a finite number, got {number!r}")
    if not training_free:
        return read_exponent, residual
    warnings.warn(
        "training_free=True is written read_exponent=0.3, residual=0.075 (in a layer with position_bias=False and "
        "conv=False): it is not all of AgentSD, whose agents are merged tokens",
        DeprecationWarning,
        stacklevel=3,
    )
    return SOFT["read_exponent"], SOFT["residual"]


def pool_agents(
    query: Tensor, agents: int | tuple[int, ...], grid: Grid | None, prefix: int, factor: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Agents (..., H, n, D), the means of the queries in each bin, and -inf where a bin is empty, (..., 1, n).

    Bins are those of adaptive average pooling: they overlap where the sides do not divide. `factor` (..., 1, Lq, 1)
    weighs the queries; without it there is no empty bin. Cost: Lq D.
    """
    shape = resolve_grid(query.shape[-2], grid, prefix)
    if math.prod(shape) == 0:
        raise ValueError(f"agents are pooled from the tokens after the prefix, but all {prefix} tokens are prefix")
    target = agent_grid(agents, shape)
    if factor is None:
        if multiplies_narrow(query, query.dtype):
            return _pooled_by_product(query[..., prefix:, :], shape, target).to(query.dtype), None
        return _pooled(wide(query)[..., prefix:, :], shape, target).to(query.dtype), None
    weight = _pooled(factor[..., prefix:, :], shape, target)
    sums = _pooled((wide(query) * factor)[..., prefix:, :], shape, target)
    A = sums / torch.where(weight > 0, weight, 1)
    absent = torch.zeros_like(weight).masked_fill(weight == 0, ABSENT).squeeze(-1)
    return A.to(query.dtype), absent.to(query.dtype)


def agent_grid(agents: int | tuple[int, ...], grid: Grid) -> Grid:
    """The grid that `agents` stands for: itself, a square (in one frame), or one row where the tokens are a row."""
    if isinstance(agents, int) and not isinstance(agents, bool):
        side = math.isqrt(max(0, agents))
        if agents >= 1 and len(grid) == 2 and grid[0] == 1:
            return (1, agents)
        if agents >= 1 and side * side == agents:
            return (*(1 for _ in grid[2:]), side, side)
    elif (
        isinstance(agents, (tuple, list))
        and len(agents) == len(grid)
        and all(isinstance(a, int) and a >= 1 for a in agents)
    ):
        return tuple(agents)
    raise ValueError(
        f"agents must be a square number, or {len(grid)} numbers (a grid of agents), for tokens on a grid "
        f"{tuple(grid)}; got {agents!r}"
    )


class AgentAttention(Mixer):
    """Agent attention as DeiT uses it: with learned position biases on both softmaxes and a depthwise convolution.

        out = softmax(scale q A^T + b2) softmax(scale A k^T + b1) v + DWC(v)

    b1 = [ac, an + ah + aw] over the keys, b2 = [ca; na + ha + wa] over the queries: tables of 7 x 7 resized bilinearly
    to the grid, plus one for rows and one for columns, and one for the prefix tokens. The 3 x 3 convolution is on
    patches only. Ours: at another grid than `grid_size` the row and column tables are resized too, and the frames of a
    clip share all tables.

    Args:
        agents: number of agents, a square number, or their grid.
        position_bias: whether b1 and b2 are learned; by default where `grid_size` is known. Off in cross attention.
        conv: whether the convolution is there; by default where `grid_size` is known. Off in cross attention.
        read_exponent, residual: a softer reading and some of the values, see `agent_attention`.
    """

    mechanism = "agent"
    an: Tensor
    ah: Tensor
    aw: Tensor
    ac: Tensor
    na: Tensor
    ha: Tensor
    wa: Tensor
    ca: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        agents: int | tuple[int, ...] = AGENTS,
        position_bias: bool | None = None,
        conv: bool | None = None,
        read_exponent: float = 1.0,
        residual: float = 0.0,
        training_free: bool = False,
        **layer: Any,
    ) -> None:
        super().__init__(dim, num_heads, **layer)
        self.read_exponent, self.residual = _softer(read_exponent, residual, training_free)
        grid_size, prefix, place = self.grid_size, self.prefix, self.place
        known = grid_size is not None and not training_free
        position_bias, conv = (known if x is None else x for x in (position_bias, conv))
        if training_free and (position_bias or conv):
            raise ValueError("training_free=True has neither position_bias nor conv; leave both at None or False")
        if grid_size is None and position_bias:
            raise ValueError("position_bias=True needs to know the grid: pass grid_size=(rows, cols) to the layer")
        self.agents = agents
        agent_grid(agents, grid_size or (1, 1))
        self.position_bias = bool(position_bias)
        if grid_size is not None and position_bias:
            H, n, (rows, cols) = num_heads, math.prod(agent_grid(agents, grid_size)), grid_size[-2:]
            shapes = {
                "an": (H, n, TABLE, TABLE), "ah": (1, H, n, rows, 1), "aw": (1, H, n, 1, cols), "ac": (1, H, n, prefix),
                "na": (H, n, TABLE, TABLE), "ha": (1, H, rows, 1, n), "wa": (1, H, 1, cols, n), "ca": (1, H, prefix, n),
            }  # fmt: skip
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.empty(shape, **place)))
        self.dwc = GridConv(dim, num_heads, 3, **place) if conv else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.parameters(recurse=False):
            nn.init.trunc_normal_(table, std=0.02)
        if self.dwc is not None:
            self.dwc.reset_parameters()

    def fit_loaded(self, state: dict[str, Any], name: str) -> None:
        """Tables of rows and columns for this grid."""
        if not self.position_bias:
            return
        assert self.grid_size is not None
        for word, side in (("ah", 0), ("aw", 1), ("ha", 0), ("wa", 1)):
            table, own = state.get(f"{name}{word}"), getattr(self, word)
            if table is None or table.shape == own.shape or table.ndim != 5:
                continue
            size = (self.grid_size[-2], 1) if side == 0 else (1, self.grid_size[-1])
            by_keys = word[0] == "a"  # the query side has its tokens before the agents
            turned = table[0] if by_keys else table[0].permute(0, 3, 1, 2)
            fitted = _resized(turned, size)
            state[f"{name}{word}"] = (fitted if by_keys else fitted.permute(0, 2, 3, 1)).unsqueeze(0)

    def run(self, call: Call, x: Tensor | None = None) -> Tensor:
        out = super().run(call, x)
        return out if self.dwc is None else out + self.dwc.of(self.on_grid(call))

    def asked(self, call: Call, x: Tensor | None) -> tuple[Call, dict[str, Any]]:
        call, queries, keys = self.on_grid(call), call.query.shape[-2], call.key.shape[-2]
        if (self.position_bias or self.dwc is not None) and queries != keys:
            raise ValueError(
                f"got {queries} queries and {keys} keys, but the position biases and the convolution of this layer "
                "need one grid for both; build it with position_bias=False and conv=False"
            )
        biases = self._biases(call.query, call.grid, call.prefix)
        softer = {"read_exponent": self.read_exponent, "residual": self.residual}
        return call, {"agents": self.agents, **softer, **biases}

    def _biases(self, query: Tensor, grid: Grid | None, prefix: int) -> dict[str, Tensor]:
        """key_bias (H, n, L) and query_bias (H, L, n) for a grid, or nothing."""
        if not self.position_bias:
            return {}
        if prefix != self.prefix:
            raise ValueError(f"the position biases were built for prefix={self.prefix} tokens, got prefix={prefix}")
        shape = resolve_grid(query.shape[-2], grid, prefix)
        key_bias = _bias(self.an, self.ah[0], self.aw[0], self.ac[0], shape)
        # The query side is the same with tokens and agents exchanged.
        rows, cols = self.ha[0].permute(0, 3, 1, 2), self.wa[0].permute(0, 3, 1, 2)
        query_bias = _bias(self.na, rows, cols, self.ca[0].mT, shape).mT
        return {"key_bias": key_bias.to(query.dtype), "query_bias": query_bias.to(query.dtype)}


def _bias(table: Tensor, rows: Tensor, cols: Tensor, first: Tensor, grid: Grid) -> Tensor:
    """(H, n, 7, 7), (H, n, r, 1), (H, n, 1, c), (H, n, p) -> (H, n, p + N) for the tokens of a grid."""
    size = tuple(grid[-2:])
    whole, rows, cols = _resized(table, size), _resized(rows, (size[0], 1)), _resized(cols, (1, size[1]))
    patches = (whole + rows + cols).flatten(-2).repeat(1, 1, math.prod(grid[:-2]))
    return torch.cat((first, patches), -1)


def _resized(table: Tensor, size: tuple[int, ...]) -> Tensor:
    """(H, n, r, c) as (H, n, *size), bilinear."""
    if tuple(table.shape[-2:]) == tuple(size):
        return table
    return F.interpolate(table, size=size, mode="bilinear", align_corners=False)


def _pooled(x: Tensor, grid: Grid, target: Grid) -> Tensor:
    """Adaptive average pooling of x (..., H, N, D) from a grid to a target grid, (..., H, n, D)."""
    image = x.mT.reshape(-1, x.shape[-1], *grid)
    pooling: Any = F.adaptive_avg_pool3d if len(grid) == 3 else F.adaptive_avg_pool2d
    pooled = pooling(image, target)
    return pooled.reshape(*x.shape[:-2], x.shape[-1], math.prod(target)).mT


def _pooled_by_product(x: Tensor, grid: Grid, target: Grid) -> Tensor:
    """The same as a product with zeros and ones (n, N), for which no image has to be written. Cost: n N D."""
    member = torch.ones(1, 1, dtype=torch.bool, device=x.device)
    for side, bins in zip(grid, target, strict=True):
        first, at = torch.arange(bins, device=x.device)[:, None], torch.arange(side, device=x.device)
        # Bin i holds what lies from floor(i side / bins) up to ceil((i + 1) side / bins).
        inside = (at >= first * side // bins) & (at < -((first + 1) * side // -bins))
        member = (member[:, None, :, None] & inside[None, :, None, :]).flatten(2).flatten(0, 1)
    rows = written_down(member.to(x.dtype)).expand(x.shape[:-2].numel(), *member.shape)
    sums = (rows @ x.flatten(0, -3)).unflatten(0, x.shape[:-2])
    return wide(sums) / member.sum(-1, keepdim=True)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    bias: Tensor | None,
    absent: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """softmax(scale q.k + bias) v over the keys that are not absent; value heads serve groups of query heads."""
    added, empty = bias, None
    if absent is not None:  # (..., 1, n), -inf where absent; rows that have nothing left get 0
        empty = (absent == ABSENT).all(-1, keepdim=True).unsqueeze(-1)
        absent = absent.unsqueeze(-2).masked_fill(empty, 0)
        added = absent if bias is None else bias + absent
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value, added))
    if learns and multiplies_narrow(query, query.dtype):
        out = _by_products(query, key, value, scale, added, dropout_p)
    else:
        added = None if added is None else added.to(query.dtype)  # biases may be wider than autocast's tokens
        options = {"scale": scale, "dropout_p": dropout_p, "enable_gqa": key.shape[-3] != query.shape[-3]}
        out = fused_softmax(query, key, value, attn_mask=added, **options)
    return out if empty is None else out.masked_fill(empty, 0)


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, scale: float, added: Tensor | None, dropout_p: float
) -> Tensor:
    """Softmax attention written out, for training on a GPU: of the two sides one is a few agents, so that nothing is
    large, and the fused kernels are slow there: backward with few keys, and altogether where a bias learns.
    """
    key, value = (repeat_heads(x, query.shape[-3]) for x in (key, value))
    logits = pair_products(query, key, query.dtype) * scale
    weights = (logits if added is None else logits + added).softmax(-1)
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    return product(weights, value, query.dtype).to(query.dtype)


AGENT = register(
    name="agent",
    summary="queries read from a few agents, pooled from them, that gather from all keys",
    paper="Agent Attention (Han et al.)",
    year=2024,
    arxiv="2312.08874",
    cost="2 L n (D + E), n agents",
    function=agent_attention,
    row_weights=one_hot_weights(agent_attention),  # of rank at most n
    module=AgentAttention,
    pattern_options={"cross": {"position_bias": False, "conv": False}},
    independent_rows=False,
    **can("cross key_mask grouped_queries subquadratic dropout key_shift wants_grid wants_query_mask"),
)
