"""timm's attention modules with another mechanism between their projections: same weights, same names.

Shape legend: B batch, L tokens, C width, H heads, D = head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...call import Call
from ...optional import needed
from ..arguments import as_key_mask
from ..fold import folded_attention, folds
from .choice import Choice, fitting, mix

# Classes whose formula is softmax(q k^T) v between projections. Matched by name, so that timm is never imported.
SELF = {
    "timm.layers.attention.Attention",
    "timm.layers.attention.AttentionRope",
    "timm.models.vision_transformer.Attention",  # where timm had it before 1.0.16
    "timm.models.eva.EvaAttention",
    "timm.models.beit.Attention",
}
CLASS_TOKEN = {"timm.models.cait.ClassAttn"}
REFUSED = {
    "timm.models.cait.TalkingHeadAttn": "mixes the logits of its heads, which have no moments (talking heads)",
    "timm.models.xcit.XCA": "attends over channels, whose cost is linear in the tokens already",
    "timm.models.swin_transformer.WindowAttention": "adds a relative position bias to the logits of small windows",
    "timm.models.swin_transformer_v2.WindowAttention": "adds a position bias to cosine logits of small windows",
    "timm.models.vision_transformer_relpos.RelPosAttention": "adds a relative position bias to the logits",
    "timm.models.vision_transformer_sam.Attention": "adds a relative position bias to the logits",
}


def class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def obstacle(module: nn.Module) -> str | None:
    """Why this timm attention must stay as it is; None if it can be converted."""
    name = class_name(module)
    if name in REFUSED:
        return f"{type(module).__name__} {REFUSED[name]}"
    if getattr(module, "relative_position_bias_table", None) is not None:
        return f"{type(module).__name__} adds a relative position bias to the logits"
    return None


def is_known(module: nn.Module) -> bool:
    """Whether its projections are taken over; other classes are watched while they run, see `inside`."""
    return isinstance(module, ConvertedAttention) or class_name(module) in SELF | CLASS_TOKEN


def is_attention(module: nn.Module) -> bool:
    """Whether this looks like an attention of timm: a known class, or one called so with projections of its own."""
    if isinstance(module, ConvertedAttention) or class_name(module) in SELF | CLASS_TOKEN | set(REFUSED):
        return True
    kind = type(module)
    projections = sum(isinstance(child, nn.Linear | nn.Conv2d) for child in module.children())
    called = "Attn" in kind.__name__ or "Attention" in kind.__name__
    return kind.__module__.startswith("timm.") and called and projections >= 2


class ConvertedAttention(nn.Module):
    """Takes over projections, norms and gate of a timm attention; `choice` says what stands between them.

        y = proj(gate(x) * norm(mix(rope(q_norm(W_q x)), rope(k_norm(W_k x)), W_v x)))

    Second-order layers without norms, rotary embedding and gate are folded where that is expected to be faster.
    """

    # What is taken over; an original has some of these.
    qkv: nn.Linear
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    q_bias: Tensor
    k_bias: Tensor
    v_bias: Tensor
    proj: nn.Linear
    proj_drop: nn.Module

    def __init__(self, original: nn.Module, choice: Choice) -> None:
        super().__init__()
        self._modules.update(original._modules)
        self._parameters.update(original._parameters)
        self._buffers.update(original._buffers)
        self._non_persistent_buffers_set |= original._non_persistent_buffers_set
        self.training = original.training
        self.choice, self.fold = choice, True
        self.num_heads: int = original.num_heads  # type: ignore[assignment]
        self.num_prefix_tokens = int(getattr(original, "num_prefix_tokens", 0))
        self.rotate_half = bool(getattr(original, "rotate_half", False))
        self.kv_heads = int(getattr(original, "num_kv_heads", self.num_heads))
        self.original_class = class_name(original)
        self.__dict__["_original"] = original  # not a submodule: its weights are the ones above

    def original(self) -> nn.Module:
        """The module this one took the place of, with the same weights."""
        return self.__dict__["_original"]

    def hand_back(self) -> None:
        """Give the original what this module has by now: weights that were moved or exchanged since, and its mode."""
        original = self.original()
        original._modules.update(self._modules)
        original._parameters.update(self._parameters)
        original._buffers.update(self._buffers)
        original.training = self.training

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        shared_rel_pos_bias: Tensor | None = None,
    ) -> Tensor:
        """x (B, L, C) -> (B, L, C); attn_mask marks keys, see `cumulant.nn.CumulantAttention`."""
        if shared_rel_pos_bias is not None:
            raise ValueError("shared_rel_pos_bias was given, but moments cannot honour a bias of the logits")
        key_mask = as_key_mask(attn_mask, x)
        bias = self._qkv_bias()
        if self._folds(x, rope, is_causal):
            W, last = self.qkv.weight, self.proj
            return self.proj_drop(folded_attention(x, W, bias, last.weight, last.bias, self.num_heads, key_mask))
        q, k, v = self._project(x, bias)
        q, k = self._normed("q_norm", q), self._normed("k_norm", k)
        if rope is not None:
            q, k = (self._rotated(z, rope).type_as(v) for z in (q, k))
        call = Call(q, k, v, key_mask, is_causal, query_mask=key_mask, dropout_p=self._dropout())
        out = mix(self, self.choice, call)
        out = self._normed("norm", out.transpose(1, 2).flatten(2))
        gate = getattr(self, "gate", None)
        if gate is not None:
            out = out * gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def extra_repr(self) -> str:
        return f"{self.original_class.rsplit('.', 1)[-1]} with {self.choice}"

    def _dropout(self) -> float:
        drop = getattr(self, "attn_drop", None)
        return float(drop.p) if self.training and drop is not None else 0.0

    def _qkv_bias(self) -> Tensor | None:
        if getattr(self, "q_bias", None) is not None:
            return torch.cat((self.q_bias, self.k_bias, self.v_bias))
        qkv = getattr(self, "qkv", None)
        return None if qkv is None else qkv.bias

    def _project(self, x: Tensor, bias: Tensor | None) -> list[Tensor]:
        """Query (B, H, L, D), key and value (B, Hk, L, D)."""
        if getattr(self, "qkv", None) is not None:
            parts = [*F.linear(x, self.qkv.weight, bias).chunk(3, -1)]
        else:
            parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        heads = (self.num_heads, self.kv_heads, self.kv_heads)
        return [z.unflatten(-1, (h, -1)).transpose(1, 2) for z, h in zip(parts, heads, strict=True)]

    def _normed(self, name: str, x: Tensor) -> Tensor:
        norm = getattr(self, name, None)
        return x if norm is None else norm(x)

    def _rotated(self, x: Tensor, rope: Tensor) -> Tensor:
        from timm.layers.pos_embed_sincos import apply_rot_embed_cat

        first, rest = x[:, :, : self.num_prefix_tokens], x[:, :, self.num_prefix_tokens :]
        return torch.cat((first, apply_rot_embed_cat(rest, rope, half=self.rotate_half)), 2)

    def _folds(self, x: Tensor, rope: Tensor | None, is_causal: bool) -> bool:
        plain = all(
            isinstance(getattr(self, name, None), nn.Identity | None) for name in ("q_norm", "k_norm", "norm", "gate")
        )
        square = getattr(self, "qkv", None) is not None and self.qkv.weight.shape[0] == 3 * x.shape[-1]
        may = bool(self.fold and self.choice.foldable and plain and square and rope is None and not self._dropout())
        return folds("auto" if may else False, x, self.num_heads, is_causal=is_causal)


class ConvertedClassAttention(ConvertedAttention):
    """CaiT's class attention: one query, of the first token, over all tokens. Cost: that of the mechanism, L D E."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x (B, L, C) -> (B, 1, C)."""
        q, k, v = (
            layer(z).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, z in ((self.q, x[:, :1]), (self.k, x), (self.v, x))
        )
        out = mix(self, self.choice, Call(q, k, v, dropout_p=self._dropout()))
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


def converted(original: nn.Module, choice: Choice) -> ConvertedAttention:
    """The module that takes the place of a timm attention."""
    kind: Any = ConvertedClassAttention if class_name(original) in CLASS_TOKEN else ConvertedAttention
    return kind(original, choice)


def register_timm(*names: str) -> list[str]:
    """Make every fitting mechanism an `attn_layer` of timm's vision transformers, and return their names.

        model = timm.create_model("vit_small_patch16_224", attn_layer="cumulant3")

    Done when timm is imported; call it for names with options, "cumulant3+around=mean". Weights keep timm's names.
    """
    with needed("this needs timm", "timm"):
        from timm.models import vision_transformer as home
    if not hasattr(home, "ATTN_LAYERS"):  # timm before 1.0.20 has no names for attention
        return []
    choices = {name: Choice.named(name) for name in (*fitting(), *names)}
    home.ATTN_LAYERS.update({name: _layer(home.Attention, choice) for name, choice in choices.items()})
    return list(choices)


def _layer(base: Any, choice: Choice) -> type[ConvertedAttention]:
    """A class that is made as timm makes its attention."""

    class NamedAttention(ConvertedAttention):
        def __init__(self, dim: int, num_heads: int = 8, **options: Any) -> None:
            super().__init__(base(dim, num_heads, **options), choice)

    return NamedAttention
