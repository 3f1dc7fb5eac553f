"""IA-RED^2: an interpreter scores the tokens, those that say little are dropped, and the scores are a heat map.

Shape legend: ... leading dimensions, B images, L tokens (the first is the policy token, kept always), C width, H heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...call import Call, check_choice, check_count, check_flag
from ...kernels import launch
from ...kernels.heads.limits import WIDEST_TOKEN
from ...tensors import wide
from ...tracing import is_plain, transformed
from ...zoo.registry import can, get, names
from ..arguments import as_key_mask
from ..registry import registered
from ..streams import attend_packed, takes_packs
from .base import HeadsLayer, need

GATHERED_FROM = 512  # tokens; below, finding those that are kept takes longer than it saves
EPS = 1e-6
NOT_OVER = {
    name: "tokens that are dropped must act on nobody: it takes no mask" for name in names() if not get(name).key_mask
}


class Interpreter(nn.Module):
    """How much each token says, I_j = mean over heads of sigmoid(q_0.k_j e^-0.5), (..., L) from x (..., L, C).

    q and k are one linear map of the normalised tokens (no gain); token 0 asks. Cost: 2 L C^2 + L C.
    """

    def __init__(self, dim: int, num_heads: int, **place: Any) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"interpreter heads must divide the width {dim}, got {num_heads}")
        self.num_heads = num_heads
        self.qk = nn.Linear(dim, 2 * dim, **place)

    def forward(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        if kept is not None:
            x = x * kept.unsqueeze(-1).to(x.dtype)
        W, bias = self.qk.weight.chunk(2), self.qk.bias.chunk(2)
        x = F.layer_norm(x, x.shape[-1:])
        query = F.linear(x[..., :1, :], W[0], bias[0]).unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
        key = F.linear(x, W[1], bias[1]).unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
        logits = wide(query @ key.mT)[..., 0, :] * query.shape[-1] ** -0.5
        told = logits.sigmoid().mean(-2)
        return told if kept is None else told * kept.to(told.dtype)

    @torch.no_grad()
    def told(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        """The same without gradients. On a GPU the map of the keys is turned on the query, once for all tokens, and one
        kernel reads them. Cost: L C H + C^2."""
        if not self._direct(x):
            return self(x, kept)
        told = self._tell(x, kept)[0]
        return told if kept is None else told * kept.to(told.dtype)

    @torch.no_grad()
    def chosen(self, x: Tensor, threshold: float) -> Tensor:
        """Which tokens are kept, `decide(told(x), threshold)`."""
        return self._tell(x, None, threshold)[1] if self._direct(x) else decide(self(x), threshold)

    def _direct(self, x: Tensor) -> bool:
        return launch.direct(x) and x.shape[-1] <= WIDEST_TOKEN

    def _tell(self, x: Tensor, kept: Tensor | None, threshold: float | None = None) -> tuple[Tensor, Tensor]:
        from ...kernels.heads.kept import tell

        flat = x.reshape(-1, *x.shape[-2:])
        first = flat[:, 0] if kept is None else flat[:, 0] * kept.reshape(flat.shape[:2])[:, :1].to(x.dtype)
        found = tell(flat, first, self.qk.weight, self.qk.bias, self.num_heads, threshold)
        return found[0].view(x.shape[:-1]), found[1].view(x.shape[:-1])


def decide(told: Tensor, threshold: float, sample: bool = False) -> Tensor:
    """Which tokens are kept, bool like `told` (..., L): those above the threshold, or drawn with that probability."""
    kept = torch.rand_like(told) < told if sample else told > threshold
    first = torch.arange(told.shape[-1], device=told.device) == 0
    return kept | first


@registered(
    "ia_red2",
    "attention among the tokens that an interpreter keeps; its scores are a heat map",
    paper="IA-RED2: Interpretability-Aware Redundancy Reduction for Vision Transformers (Pan et al.)",
    year=2021,
    arxiv="2106.12620",
    cost="that of the mechanism for the tokens that are kept",
    not_over=NOT_OVER,
    **can("key_mask ragged weights"),
)
class RedundancyReduction(HeadsLayer):
    """Attention among the tokens that the interpreter keeps; a dropped token gets nothing added and gives nothing.

        I = interpreter(x),  u = I > threshold or the first token,  y_j = u_j layer(x with keys where u = 1)_j

    No gradient reaches the interpreter through u: it learns by reward, see `policy_loss`. Cost: that of the layer for
    the tokens that are kept, and 2 L C^2 for the interpreter.

    Args:
        threshold: tokens above it are kept; below 0 keeps all.
        interpreter_heads: heads of the interpreter; as many as the layer has unless given.
        sparse: compute with the kept tokens alone, gathered: True, False (masked), or "auto", in evaluation from 512
            tokens on, on a GPU where the mechanism takes sequences end to end. The output is the same.
    """

    _counts: list[int] | None = None  # tokens of each image while they lie end to end

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        threshold: float = 0.5,
        interpreter_heads: int | None = None,
        sparse: bool | str = "auto",
        **layer: Any,
    ) -> None:
        super().__init__(dim, num_heads, **layer)
        need(self.layer_name, self.mechanism, "key_mask", "drops tokens", "take threshold=-1 in another layer")
        check_choice("sparse", sparse, (True, False, "auto"))
        if interpreter_heads is not None:
            check_count("interpreter_heads", interpreter_heads)
        self.threshold, self.sparse = threshold, sparse
        self.interpreter = Interpreter(dim, interpreter_heads or num_heads, **self.place)

    def importance(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """The heat map I (..., L), from 0 to 1."""
        return self.interpreter(x, None if attn_mask is None else attn_mask != 0)

    def call(  # type: ignore[override]
        self, x: Tensor, context: Tensor | None = None, key_mask: Tensor | None = None, is_causal: bool = False,
        **layout: Any,
    ) -> Call:  # fmt: skip
        if is_causal or context is not None:
            raise ValueError(
                "layer 'ia_red2' drops tokens of one sequence by what the first says of all: no is_causal, no context"
            )
        self._check_width("x", x)
        if not x.shape[-2]:
            raise ValueError("layer 'ia_red2' needs at least one token, the first of which is kept, got none")
        kept = self.kept(x, key_mask)
        mask = kept if key_mask is None or key_mask.dtype == torch.bool else kept.to(key_mask.dtype) * key_mask
        return super().call(x, None, mask, **layout)

    def kept(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Which tokens stay, bool (..., L)."""
        if key_mask is None:
            return self.interpreter.chosen(x, self.threshold)
        present = (key_mask != 0).expand(x.shape[:-1])
        return decide(self.interpreter.told(x, present), self.threshold) & present

    def forward(  # type: ignore[override]
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, context: Tensor | None = None,
        **layout: Any,
    ) -> Tensor:  # fmt: skip
        self.check_whole()
        check_flag("is_causal", is_causal)
        if not is_causal and context is None and self._gathers(x):
            mask = as_key_mask(attn_mask, x)
            kept = self.kept(x, mask)
            flat = x.reshape(-1, *x.shape[-2:])
            if (mask is None or mask.dtype == torch.bool) and takes_packs(self, x):
                pack = Pack.of(flat, kept.reshape(flat.shape[:2]), room=True)
                return pack.unpacked(attend_packed(self, pack.tokens, pack.cu_seq, x.shape[-2])).reshape(x.shape)
            if mask is None or mask.dtype == torch.bool:
                counts = kept.reshape(flat.shape[:2]).sum(-1).tolist()
                if sum(counts) >= GATHERED_FROM * len(counts):
                    return self._one_by_one(flat, kept.reshape(flat.shape[:2]), counts).reshape(x.shape)
            few, there, back = gather_kept(flat, kept.reshape(-1, x.shape[-2]))
            weights = there
            if mask is not None and mask.dtype != torch.bool:
                weights = mask.expand(x.shape[:-1]).reshape(flat.shape[:2]).gather(1, back) * there
            call = super().call(few, None, weights)
            return scatter_kept(self.attend(call, few), there, back, flat.shape).reshape(x.shape)
        call = self.asked(x, attn_mask, is_causal, context, **layout)
        assert call.key_mask is not None
        out = self.attend(call, x)
        return out * (call.key_mask != 0).unsqueeze(-1).to(out.dtype)

    def _one_by_one(self, x: Tensor, kept: Tensor, counts: list[int]) -> Tensor:
        """For long images: the kept tokens of all end to end, attention image by image, which needs no mask."""
        few = x[kept].unsqueeze(0)
        self._counts = counts
        try:
            out = self.attend(super().call(few), few)[0]
        finally:
            self._counts = None
        return out.new_zeros(x.shape).masked_scatter(kept.unsqueeze(-1), out)

    def mix_tokens(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        if self._counts is None:
            return super().mix_tokens(call, x, context)
        parts = zip(*(part.split(self._counts, -2) for part in call[:3]), strict=True)
        rows = [call._replace(query=q, key=k, value=v, key_mask=None, query_mask=None) for q, k, v in parts]
        return torch.cat([super(RedundancyReduction, self).mix_tokens(one, x) for one in rows], -2)

    def _gathers(self, x: Tensor) -> bool:
        if self.sparse is True:
            return True
        plain = not torch.compiler.is_compiling() and is_plain(x) and not transformed()
        long = self.sparse == "auto" and not self.training and x.shape[-2] >= GATHERED_FROM
        here = plain and not self.mechanism.wants_grid and self.v_conv is None
        here = here and (x.device.type == "cpu" or takes_packs(self, x))
        return bool(long and here)


class Pack(NamedTuple):
    """The kept tokens of x (B, L, C) end to end, and where they were."""

    tokens: Tensor  # (T, C), or (B L, C) of which T are tokens
    cu_seq: Tensor  # (B + 1,): where each image begins
    places: Tensor  # (T,) in the rows of x; with `kept`, how many are kept up to each row (B L,)
    shape: torch.Size  # of x
    kept: Tensor | None = None  # (B, L) where kernels move the rows

    @classmethod
    def of(cls, x: Tensor, kept: Tensor, room: bool = False) -> Pack:
        """Waits once for the device: how many are left decides the size of all that follows. `room`: where kernels move
        the rows there is room for all of them instead, and nobody waits; what no token is in was never written."""
        if launch.direct(x) and not torch.is_grad_enabled() and x.shape[-1] <= WIDEST_TOKEN:
            from ...kernels.heads.kept import numbered, taken_out

            number, cu_seq = numbered(kept)
            many = kept.numel() if room else int(launch.Arriving(cu_seq[-1:]).get())
            return cls(taken_out(x, number, kept, many), cu_seq, number, x.shape, kept)
        places = kept.flatten().nonzero()[:, 0]
        cu_seq = F.pad(kept.sum(-1).cumsum(0), (1, 0)).int()
        return cls(x.flatten(0, 1).index_select(0, places), cu_seq, places, x.shape)

    def unpacked(self, tokens: Tensor) -> Tensor:
        """Tokens (T, C) at their places, (B, L, C); 0 elsewhere."""
        if self.kept is not None:
            from ...kernels.heads.kept import put_back

            return put_back(tokens, self.places, self.kept)
        rows = tokens.new_zeros(self.shape[0] * self.shape[1], self.shape[2])
        return rows.index_copy(0, self.places, tokens).view(self.shape)


def gather_kept(x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kept tokens of x (B, L, C) first, padded to the most of the batch: (B, K, C), which are there (B, K), and
    their places (B, K)."""
    most = max(1, int(kept.sum(-1).max()))
    back = (~kept).to(torch.uint8).argsort(dim=-1, stable=True)[:, :most]
    return x.gather(1, back[..., None].expand(-1, -1, x.shape[-1])), kept.gather(1, back), back


def scatter_kept(few: Tensor, there: Tensor, back: Tensor, shape: torch.Size) -> Tensor:
    """Rows (B, K, C) at their places among (B, L, C); 0 elsewhere."""
    few = few * there.unsqueeze(-1).to(few.dtype)
    return few.new_zeros(shape).scatter(1, back[..., None].expand_as(few), few)


def reward(kept: Tensor, right: Tensor, tau: float) -> Tensor:
    """(B,): 1 - (share of the patches (B, N) that is kept)^2 where the answer is right, else -tau."""
    share = kept.to(torch.float32).mean(-1)
    return torch.where(right, 1 - share.square(), torch.full_like(share, -tau))


def policy_loss(told: Tensor, kept: Tensor, advantage: Tensor, live: Tensor | None = None) -> Tensor:
    """-mean over images of advantage times log probability of the drawn u: told I, u and live (B, N) of patches.

    The advantage (B,) is the reward of what was drawn less that of the greedy choice; it has no gradient.
    """
    told = wide(told).clamp(EPS, 1 - EPS)
    logs = torch.where(kept, told.log(), (1 - told).log())
    logs = logs if live is None else logs * live.to(logs.dtype)
    return -(advantage.detach() * logs.sum(-1)).mean()
