"""Attention followed through the layers: rollout of maps, and relevance for a class, both for signed maps.

Shape legend: B images, H heads, L tokens, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..call import check_choice, check_flag
from ..inspect.sites import Site, find_sites
from ..inspect.tokens import TokenLayout
from ..inspect.watching import Seen, watching
from ..kinds import check_kinds, kinds_checked
from ..tracing import without_autocast
from .capture import NO_WEIGHTS, Captured
from .heads import before_projection, plain_output

SIGNS = ("absolute", "positive", "signed")
EVIDENCE = ("for", "against")


@kinds_checked
def rollout(captured: Captured, *, sign: str = "absolute", residual: float = 0.5) -> Tensor:
    """How much of each input token reaches each output token, (B, L, L): the product over layers of r I + (1 - r) A.

    A is the mean map of the heads (Abnar and Zuidema 2020). Their maps have no signs; for signed ones `sign` chooses
    - "absolute": |A| with rows divided by their sum. What takes part, whether added or subtracted; rows sum to 1;
    - "positive": the positive part of A with rows divided by their sum. What is added;
    - "signed": A as it is. Where rows sum to 1 they still do after any number of layers, so this is the exact linear
      flow with cancellations; its entries may be negative and grow with the negative mass.
    For maps without negative entries whose rows sum to 1 the three are the same. Cost: L^3 per layer.
    """
    check_choice("sign", sign, SIGNS)
    if not isinstance(captured, Captured):
        how = "with capture(model) as captured: model(images)"
        raise TypeError(f"captured must be the maps of a forward pass ({how}), got {type(captured).__name__}")
    if not 0 <= residual < 1:
        raise ValueError(f"residual must be at least 0 and below 1, got {residual}")
    if captured.queries != list(range(captured.tokens.count)):
        raise ValueError('rollout needs the rows of all tokens: capture(model, queries="all")')
    flow: Tensor | None = None
    for layer in sorted(captured.layers):
        A = unsigned(captured.maps(layer).mean(1), sign)
        step = residual * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device) + (1 - residual) * A
        flow = step if flow is None else step @ flow
    assert flow is not None
    return flow


def unsigned(A: Tensor, sign: str) -> Tensor:
    """A map (..., L) without signs and with rows that sum to 1, or as it is for "signed"."""
    if sign == "signed":
        return A
    A = A.abs() if sign == "absolute" else A.clamp(min=0)
    return A / A.sum(-1, keepdim=True).clamp(min=1e-12)


def relevance(
    model: nn.Module,
    images: Tensor,
    target: Tensor | int | None = None,
    *,
    evidence: str = "for",
    centred: bool = False,
) -> Tensor:
    """Gradient-weighted relevance (B, L, L) of each input token for the logit of `target`, seen from each token.

        R <- R + E R,  E = mean over heads of max(0, A * G),  G_ij = d logit / d A_ij = (d logit / d out_i) . v_j

    (Chefer et al. 2021), R starting at the identity. G is exact and needs no matrix in the model: only the gradient of
    each head's output. Signed maps need one care: the positive part is taken of the product A * G, never of A alone.
    A negative weight on a token that speaks against the class has a positive product and counts in favour; cutting
    A at 0 would lose it. `evidence="against"` takes the negative part of the product instead.

    Rows of A sum to 1, so only changes along that plane are possible: `centred=True` takes G_ij - sum_j A_ij G_ij,
    which for softmax is the gradient of the logits of the attention, and does not change when all values are shifted.

    target: a class, one for each image (B,), or None for the predicted one. Cost: a backward pass and L^2 H D a layer.
    Layers with a norm or gate after mixing and factorised video layers are refused.
    """
    check_choice("evidence", evidence, EVIDENCE)
    check_flag("centred", centred)
    check_kinds(relevance, {"model": model, "images": images})
    sites = find_sites(model)
    for site in sites:
        if not plain_output(site) or site.axes != "all":
            raise ValueError(f"layer {site.number} ({site.name}) does not mix all tokens into its projection directly")
    calls: dict[int, Seen] = {}
    outputs: dict[int, Tensor] = {}

    def see(site: Site, call: Seen, layout: TokenLayout) -> None:
        calls[site.number] = call

    def note(site: Site, joined: Tensor) -> None:
        outputs[site.number] = joined

    with watching(model, sites, see), before_projection(model, sites, note), torch.enable_grad():
        logits = logits_of(model(images.detach().requires_grad_(images.is_floating_point())))
        chosen = logits.argmax(-1) if target is None else _classes(target, logits)
        score = logits.gather(-1, chosen[:, None]).sum()
        order = [site.number for site in sites if site.number in outputs]
        gradients = torch.autograd.grad(score, [outputs[n] for n in order], allow_unused=True)
    with torch.no_grad():
        R: Tensor | None = None
        for number, gradient in zip(order, gradients, strict=True):
            if number not in calls:
                raise RuntimeError(f"layer {number} ({sites[number].name}) {NO_WEIGHTS}")
            A, value = calls[number].weights(), calls[number].value()
            if R is None:
                R = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand(A.shape[0], -1, -1)
            if gradient is None:
                continue
            heads = gradient.unflatten(-1, (sites[number].heads, -1)).transpose(-3, -2)
            with without_autocast(A.device.type):
                G = heads.to(A.dtype) @ value.to(A.dtype).mT
                if centred:
                    G = G - (A * G).sum(-1, keepdim=True)
                E = A * G if evidence == "for" else -(A * G)
                R = R + E.clamp(min=0).mean(1) @ R
    assert R is not None
    return R


def _classes(target: Tensor | int, logits: Tensor) -> Tensor:
    """The class (B,) of each image whose logits (B, K) these are."""
    count, classes = logits.shape[0], logits.shape[-1]
    chosen = torch.as_tensor(target, device=logits.device)
    whole = not chosen.is_floating_point() and chosen.shape in ((), (count,))
    if not whole or bool(((chosen < 0) | (chosen >= classes)).any()):
        raise ValueError(
            f"target must be a class from 0 to {classes - 1}, or one for each of the {count} images, got {target}"
        )
    return chosen.long().expand(count)


@kinds_checked
def token_map(flow: Tensor, tokens: TokenLayout, row: int | str = "auto") -> Tensor:
    """One row of a rollout or relevance (B, L, L) as a map over the patches, (B, *grid).

    row: a token, "mean" of all patches (for models that pool), or "auto": the class token where there is one.
    """
    if row == "auto":
        row = 0 if tokens.prefix else "mean"
    if isinstance(row, str) and row != "mean":
        raise ValueError(f'row must be a token, "mean" or "auto", got {row!r}')
    picked = flow[:, tokens.prefix :].mean(1) if isinstance(row, str) else flow[:, row]
    return picked[:, tokens.prefix :].unflatten(-1, tokens.grid)


def logits_of(output: Any) -> Tensor:
    """Logits (B, classes) of whatever a classifier returns."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return output[0]
    logits = getattr(output, "logits", None)
    if logits is None:
        raise ValueError(f"the model must return logits, got {type(output).__name__} without any")
    return logits
