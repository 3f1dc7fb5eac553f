"""MARRO: attention over the sentences of a document, a BiLSTM, a CRF, and a second task that finds where roles change.

Shape legend: B documents, T sentences, C = H D width of a sentence, K tags (pad, start and end among them).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ...call import Call
from ...zoo.registry import can
from ..registry import create_layer, registered
from .base import HeadsLayer

PAD, START, END, FIRST = 0, 1, 2, 3  # tags; those of roles follow
NEVER = -1e6
SHIFT_TAGS = FIRST + 2


@registered(
    "marro",
    "a block of attention over sentences with residual and norm, for labels of long documents",
    paper="MARRO: Multi-headed Attention for Rhetorical Role Labeling in Legal Documents (Bambroo et al.)",
    year=2025,
    arxiv="2503.10659",
    cost="that of the mechanism",
    **can("causal cross key_mask ragged streaming equivariant weights"),
)
class SentenceAttention(HeadsLayer):
    """One block of attention over sentences, after which comes the norm: y = LayerNorm(x + dropout(layer(x))).

    There is no place in it: order comes from the LSTM that follows. Cost: that of the mechanism.

    Args:
        block_drop: dropout before the residual, and on the probabilities where the mechanism has any.
        legacy_view: read the heads of `H` sentences as one sentence, as the released code does by mistake.
    """

    def __init__(
        self, dim: int, num_heads: int = 5, *, block_drop: float = 0.2, legacy_view: bool = False, **layer: Any
    ) -> None:
        if not 0 <= block_drop < 1:
            raise ValueError(f"block_drop must be at least 0 and below 1, got {block_drop}")
        super().__init__(dim, num_heads, **layer)
        if self.mechanism.dropout and not self.attn_drop:
            self.attn_drop = block_drop
        self.legacy_view = legacy_view
        self.after = nn.LayerNorm(dim, eps=1e-5, **self.place)
        self.block_drop = nn.Dropout(block_drop)

    def attend(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        out = super().attend(call, x, context)
        return self.after(x + self.block_drop(out)).to(out.dtype)

    def mix_tokens(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        out = super().mix_tokens(call, x, context)
        if not self.legacy_view:
            return out
        return out.reshape(*x.shape[:-1], self.num_heads, -1).transpose(-3, -2)  # undone by the layer: a plain view


class CRF(nn.Module):
    """A chain of tags: score = T[start, y_1] + e_1 + sum_i (T[y_{i-1}, y_i] + e_i) + T[y_last, end].

    Nothing enters start, leaves end, or touches pad within a document. Cost: T K^2.
    """

    def __init__(self, tags: int, **place: Any) -> None:
        super().__init__()
        if tags <= FIRST:
            raise ValueError(f"tags must be more than {FIRST} (pad, start, end and the roles), got {tags}")
        self.tags = tags
        self.transitions = nn.Parameter(torch.empty(tags, tags, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.transitions, -0.1, 0.1)
        with torch.no_grad():
            self.transitions[:, START] = NEVER
            self.transitions[END, :] = NEVER
            self.transitions[PAD, :] = NEVER
            self.transitions[:, PAD] = NEVER
            self.transitions[PAD, END] = self.transitions[PAD, PAD] = 0

    def score(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        """Of each document's tags (B, T), with emissions (B, T, K) and mask (B, T): (B,)."""
        T, each = self.transitions, emissions.gather(-1, tags[..., None])[..., 0]
        steps = (T[tags[:, :-1], tags[:, 1:]] + each[:, 1:]) * mask[:, 1:]
        last = tags.gather(1, mask.sum(1, keepdim=True) - 1)[:, 0]
        return T[START, tags[:, 0]] + each[:, 0] + steps.sum(1) + T[last, END]

    def log_partition(self, emissions: Tensor, mask: Tensor) -> Tensor:
        """Logarithm of the sum of exp(score) over all tags, (B,)."""
        T = self.transitions
        alpha = T[START] + emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            after = torch.logsumexp(alpha[:, :, None] + T, 1) + emissions[:, t]
            alpha = torch.where(mask[:, t, None], after, alpha)
        return torch.logsumexp(alpha + T[:, END], -1)

    def loss(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        """-log of the probability of the tags, summed over the documents."""
        check_lengths(emissions, mask)
        return (self.log_partition(emissions, mask) - self.score(emissions, tags, mask)).sum()

    @torch.no_grad()
    def best(self, emissions: Tensor, mask: Tensor) -> Tensor:
        """The most probable tags (B, T), pad where there is no sentence (Viterbi)."""
        check_lengths(emissions, mask)
        T, backs = self.transitions, []
        alpha = T[START] + emissions[:, 0]
        none = torch.arange(self.tags, device=alpha.device).expand_as(alpha)
        for t in range(1, emissions.shape[1]):
            found, back = (alpha[:, :, None] + T).max(1)
            alpha = torch.where(mask[:, t, None], found + emissions[:, t], alpha)
            backs.append(torch.where(mask[:, t, None], back, none))
        path = [(alpha + T[:, END]).argmax(-1)]
        for back in reversed(backs):
            path.append(back.gather(1, path[-1][:, None])[:, 0])
        return torch.stack(path[::-1], 1).masked_fill(~mask, PAD)


class Marro(nn.Module):
    """Roles of the sentences of documents, x (B, T, C) and, for the second task, xs (B, T, S), with their lengths.

        roles:  attention blocks, BiLSTM, with the other branch's states: linear, CRF
        shift:  linear(linear(xs)) beside x, BiLSTM, linear, CRF: does the role change after this sentence?
        loss = (1 - mu) roles + mu shift

    Args:
        roles: how many; tags are pad, start, end and these.
        dim, num_heads, depth: of the attention blocks; depth 0 is the BiLSTM-CRF alone.
        shift_dim: width S of the features of a pair of sentences; 0 leaves the second task out.
        mu: weight of the second task.
        random_states: draw the first LSTM states at each call, as released; zeros otherwise.
    """

    def __init__(
        self,
        roles: int,
        dim: int = 200,
        num_heads: int = 5,
        *,
        attention: str = "softmax",
        depth: int = 2,
        hidden: int = 100,
        shift_dim: int = 0,
        mu: float = 0.95,
        drop: float = 0.5,
        random_states: bool = False,
        **block: Any,
    ) -> None:
        super().__init__()
        if not 0 <= mu <= 1:
            raise ValueError(f"mu must be a weight between 0 and 1, got {mu}")
        self.mu, self.random_states, self.hidden = mu, random_states, hidden
        self.blocks = nn.ModuleList(
            create_layer("marro", dim, num_heads, attention=attention, **block) for _ in range(depth)
        )
        self.lstm = nn.LSTM(dim, hidden, batch_first=True, bidirectional=True)
        self.shift_in = (
            nn.Sequential(nn.Linear(shift_dim, 2 * shift_dim), nn.Linear(2 * shift_dim, dim)) if shift_dim else None
        )
        self.shift_lstm = nn.LSTM(2 * dim, hidden, batch_first=True, bidirectional=True) if shift_dim else None
        self.shift_out = nn.Linear(2 * hidden, SHIFT_TAGS) if shift_dim else None
        self.shift_crf = CRF(SHIFT_TAGS) if shift_dim else None
        self.out = nn.Linear((4 if shift_dim else 2) * hidden, roles + FIRST)
        self.crf = CRF(roles + FIRST)
        self.drop = nn.Dropout(drop)

    def emissions(self, x: Tensor, lengths: Tensor, xs: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Of roles (B, T, K) and of changes (B, T, 5), or None without the second task."""
        mask = mask_of(lengths, x.shape[1])
        z = x
        for block in self.blocks:
            z = block(z, attn_mask=mask)
        read = self._read(self.lstm, z, lengths)
        if self.shift_lstm is None or self.shift_in is None or self.shift_out is None:
            return self.out(self.drop(read)), None
        if xs is None:
            raise ValueError("xs must be given: this model was made with shift_dim, for features of pairs of sentences")
        moved = self._read(self.shift_lstm, torch.cat((self.shift_in(xs), x), -1), lengths)
        return self.out(self.drop(torch.cat((read, moved), -1))), self.shift_out(self.drop(moved))

    def loss(self, x: Tensor, lengths: Tensor, roles: Tensor, xs: Tensor | None = None) -> Tensor:
        """For roles (B, T), numbers from 0 on; what stands beyond the lengths is not read. Summed over documents."""
        mask = mask_of(lengths, x.shape[1])
        emissions, moved = self.emissions(x, lengths, xs)
        tags = (roles + FIRST).masked_fill(~mask, PAD)
        loss = self.crf.loss(emissions, tags, mask)
        if moved is None or self.shift_crf is None:
            return loss
        changes = (shifts(roles, lengths) + FIRST).masked_fill(~mask, PAD)
        return (1 - self.mu) * loss + self.mu * self.shift_crf.loss(moved, changes, mask)

    def forward(self, x: Tensor, lengths: Tensor, xs: Tensor | None = None) -> Tensor:
        """The most probable roles (B, T), -1 beyond the lengths."""
        mask = mask_of(lengths, x.shape[1])
        return (self.crf.best(self.emissions(x, lengths, xs)[0], mask) - FIRST).masked_fill(~mask, -1)

    def _read(self, lstm: nn.LSTM, x: Tensor, lengths: Tensor) -> Tensor:
        states = None
        if self.random_states:
            states = tuple(x.new_empty(2, len(x), self.hidden).normal_() for _ in range(2))
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(lstm(packed, states)[0], batch_first=True, total_length=x.shape[1])[0]


def shifts(roles: Tensor, lengths: Tensor) -> Tensor:
    """1 where the role of the next sentence is another, (B, T); 0 for a document's last."""
    changed = torch.zeros_like(roles)
    changed[:, :-1] = (roles[:, 1:] != roles[:, :-1]).to(roles.dtype)
    return changed * mask_of(lengths - 1, roles.shape[1])


def mask_of(lengths: Tensor, longest: int) -> Tensor:
    """Which of `longest` sentences each document has, (B, T)."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def check_lengths(emissions: Tensor, mask: Tensor) -> None:
    if not emissions.shape[1] or not bool(mask.any(1).all()):
        raise ValueError("every document must have at least one sentence, got one without")
