"""diffusers: mechanisms as entries of its registry of attention backends, `model.set_attention_backend("cumulant3")`.

Shape legend: B batch, Lq queries, Lk keys, H heads, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...call import Call
from ...optional import needed
from .choice import Choice, fitting, mix, placed
from .masks import merged


def register_diffusers(*names: str) -> list[str]:
    """Make every fitting mechanism an attention backend of diffusers, and return their names.

        transformer.set_attention_backend("cumulant3")

    Done when diffusers is imported; call it for names with options, "cluster64+near=4". Masks that differ from query to
    query are an error, since moments are taken once for all queries.
    """
    with needed("this needs diffusers", "diffusers"):
        from diffusers.models import attention_dispatch as home
    choices = {name: Choice.named(name) for name in (*fitting(), *names)}
    for name, choice in choices.items():
        home._AttentionBackendRegistry.register(_member(home.AttentionBackendName, name))(_entry(choice))
    return list(choices)


def _member(names: Any, name: str) -> Any:
    """The backend's name as a member of diffusers' enumeration, which knows its own alone."""
    if name not in names._value2member_map_:
        member = str.__new__(names, name)
        member._name_, member._value_ = name.upper(), name
        names._member_map_[member._name_] = names._value2member_map_[name] = member
        names._member_names_.append(member._name_)
    return names(name)


def _entry(choice: Choice) -> Callable[..., Tensor]:
    layer = nn.Module()  # backends are not told whose attention they compute

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """query (B, Lq, H, D), key and value (B, Lk, H, D) -> (B, Lq, H, D)."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        call, offset = Call(q, k, v, is_causal=is_causal, scale=scale, dropout_p=dropout_p), 0
        if attn_mask is not None:
            if attn_mask.ndim == 2:  # (B, Lk), as the backends of diffusers take it
                attn_mask = attn_mask[:, None, None, :]
            seen = merged([attn_mask], q.shape[2], k.shape[2])
            offset = int(seen.offset)
            call = call._replace(key_mask=seen.key_mask, is_causal=is_causal or seen.is_causal)
        call, rows = placed(choice, call, offset)
        return mix(layer, choice, call)[:, :, rows].transpose(1, 2)

    return attend
