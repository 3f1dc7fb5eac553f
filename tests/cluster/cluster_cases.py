"""What the tests of cluster attention share: inputs, softmax, and a direct form of the formulas, token by token."""

import torch
import torch.nn.functional as F
from random_tokens import tokens as tokens_of

from cumulant.closures import gain, log_mass


def tokens(queries=24, keys=24, heads=2, key_heads=2, dim=6, value_dim=5, **more):
    return tokens_of(queries, keys, heads, key_heads, dim, value_dim, **more)


def softmax(query, key, value, key_mask=None, is_causal=False, scale=None):
    """By the definition, weights and empty rows included."""
    logits = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = torch.ones(key.shape[-2], dtype=query.dtype) if key_mask is None else key_mask.to(query.dtype)
    weights = weights[..., None, None, :].expand_as(logits)
    if is_causal:
        weights = weights.tril()
    e = (logits - logits.max(-1, keepdim=True).values).exp() * weights
    return torch.nan_to_num(e / e.sum(-1, keepdim=True)) @ value


def by_definition(query, key, value, ids, near=0, closure="tanh"):
    """Cluster attention of one query (D,) over key (L, D), value (L, E) with cluster ids (L,), in a loop."""
    q = query * query.shape[-1] ** -0.5
    parts = []  # (log mass, variance of the logits, value)
    for c in ids.unique():
        k, v = key[ids == c], value[ids == c]
        dk, dv = k - k.mean(0), v - v.mean(0)
        variance = (q**2 * (dk**2).mean(0)).sum()
        mass = torch.tensor(float(len(k))).log() + q @ k.mean(0) + log_mass(variance, closure)
        out = v.mean(0) + gain(variance, closure) * (dk.T @ dv / len(k)).T @ q
        parts.append((mass, k, v, out))
    heaviest = torch.stack([mass for mass, *_ in parts]).topk(min(near, len(parts))).indices.tolist()
    logits, values = [], []
    for c, (mass, k, v, out) in enumerate(parts):
        logits += list(k @ q) if c in heaviest else [mass]
        values += list(v) if c in heaviest else [out]
    return F.softmax(torch.stack(logits), 0) @ torch.stack(values)
