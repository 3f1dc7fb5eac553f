"""A ViT that drops tokens before each group of its blocks: IA-RED^2, with the reward that teaches it.

Shape legend: B images, T = 1 + N tokens, N patches, C width, G groups of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..nn.heads.ia_red2 import Interpreter, Pack, decide, gather_kept, policy_loss, reward, scatter_kept
from ..nn.streams import attend_packed, takes_packs
from ..zoo.registry import options_of
from .backbone import FeatureInfo
from .parts import Block
from .vit import VisionTransformer


class Kept(NamedTuple):
    """What the interpreters said and decided, for each group I and u, (B, T); and the tokens after it, (B, T, C)."""

    told: list[Tensor]
    kept: list[Tensor]
    after: list[Tensor]


@options_of(VisionTransformer)
class InterpretedViT(VisionTransformer):
    """A vision transformer whose blocks come in groups; before each an interpreter drops tokens, which are then gone.

    Arguments beyond those of `VisionTransformer`; its weights load with `strict=False`.

    Args:
        groups: blocks of each group; three of equal size unless given.
        threshold: tokens that an interpreter gives more are kept; below 0 keeps all.
        interpreter_heads: of each interpreter; as many as the blocks have unless given.
    """

    sparse = True  # dropped tokens are gone; False masks them, as who looks at maps of all tokens wants it

    def __init__(
        self,
        *,
        groups: Sequence[int] | None = None,
        threshold: float = 0.5,
        interpreter_heads: int | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        depth, heads = len(self.blocks), cast(Any, self.blocks[0]).attn.num_heads
        groups = [depth // 3, depth // 3, depth - 2 * (depth // 3)] if groups is None else list(groups)
        if sum(groups) != depth or min(groups) < 1:
            raise ValueError(f"groups must be of at least one block each and {depth} together, got {tuple(groups)}")
        if self.pool != "cls" or self.num_prefix_tokens != 1:
            raise ValueError("an interpreter asks as the class token, which is never dropped: pool must be 'cls'")
        cast(Any, self.blocks[0]).attn.mechanism.require("key_mask")
        self.groups, self.threshold = groups, threshold
        ends = [sum(groups[: number + 1]) - 1 for number in range(len(groups))]
        self.feature_info = FeatureInfo(self.feature_info[end] for end in ends)
        place: dict[str, Any] = {"device": rest.get("device"), "dtype": rest.get("dtype")}
        self.interpreters = nn.ModuleList(
            Interpreter(self.embed_dim, interpreter_heads or heads, **place) for _ in groups
        )

    def _walk(self, x: Tensor, wanted: Sequence[int] = (), norm: bool = False, to_end: bool = True) -> Any:
        """Tokens (B, T, C) after the last block and norm, 0 where they were dropped; maps after groups of blocks."""
        last, found = self.passed(x)
        states = [self._normed(found.after[group]) if norm else found.after[group] for group in wanted]
        return last, [self._as_map(state, self.patch_embed.grid(*x.shape[-2:])) for state in states]

    def passed(
        self, images: Tensor, *, last: int | None = None, sample: int | None = None, dense: bool = False,
        fixed: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Kept]:  # fmt: skip
        """Tokens after the last norm, and what the interpreters said, without gradients for these.

        `last`: interpreters after that group pass the choice on; `sample`: that group draws its choice; `dense`: tokens
        that are dropped are masked, not gathered away (the same result); `fixed`: choices (B, T) in place of theirs.
        """
        x, start = self.embed(images), 0
        kept = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        found = Kept([], [], [])
        for number, size in enumerate(self.groups):
            if fixed is not None:
                kept, told = fixed[number] & kept, kept.to(x.dtype)
            elif last is None or number <= last:
                told = cast(Interpreter, self.interpreters[number]).told(x, kept)
                kept = decide(told, self.threshold, sample=number == sample) & kept
            found.told.append(told)
            found.kept.append(kept)
            blocks = self._group(start, size)
            start += size
            if dense or not self.sparse:
                x = _through(blocks, x * kept.unsqueeze(-1).to(x.dtype), kept)
            elif not self.training and all(takes_packs(cast(Block, block).attn, x) for block in blocks):
                pack = Pack.of(x, kept)
                x = pack.unpacked(_through_pack(blocks, pack))
            elif not bool(kept.all()):
                few, there, back = gather_kept(x, kept)
                few = _through(blocks, few, None if bool(there.all()) else there)
                x = scatter_kept(few, there, back, x.shape)
            else:
                x = _through(blocks, x, None)
            found.after.append(x)
        return self.norm(x) * kept.unsqueeze(-1).to(x.dtype), found

    def heat(self, images: Tensor) -> Tensor:
        """How much each patch says to each group, (B, G, rows, cols), from 0 to 1; 0 where it was dropped before."""
        grid = self.patch_embed.grid(*images.shape[-2:])
        return self.told(images)[..., 1:].unflatten(-1, grid)

    @torch.no_grad()
    def told(self, images: Tensor) -> Tensor:
        """The same of all tokens, the class token first, (B, G, T)."""
        return torch.stack(self.passed(images)[1].told, 1)

    def kept_share(self, images: Tensor) -> Tensor:
        """Share of the patches that each group works on, (G,)."""
        with torch.no_grad():
            _, found = self.passed(images)
        return torch.stack([kept[:, 1:].float().mean() for kept in found.kept])

    def work(self, images: Tensor) -> Tensor:
        """Relative cost, 1 - sum_g (1 - share_g) size_g / depth: 1 where all are kept."""
        sizes = torch.tensor(self.groups, dtype=torch.float32, device=images.device)
        return 1 - ((1 - self.kept_share(images)) * sizes / sizes.sum()).sum()

    def reward_loss(self, images: Tensor, labels: Tensor, group: int, tau: float = 3.0) -> Tensor:
        """What teaches the interpreter of a group: REINFORCE with the greedy choice as baseline. Later groups pass its
        choice on. A wrong answer costs tau."""
        with torch.no_grad():
            rewards = []
            for sample in (None, group):
                x, found = self.passed(images, last=group, sample=sample, dense=True)  # waits for nothing
                right = cast(Tensor, self.forward_head(x)).argmax(-1) == labels
                rewards.append(reward(found.kept[group][:, 1:], right, tau))
            drawn = found
        before = drawn.kept[group - 1] if group else torch.ones_like(drawn.kept[0])
        with torch.no_grad():
            reached = self.reaching(images, drawn.kept[:group])
        told = self.interpreters[group](reached, before)[:, 1:]
        return policy_loss(told, drawn.kept[group][:, 1:], rewards[1] - rewards[0], before[:, 1:])

    def _group(self, start: int, size: int) -> list[nn.Module]:
        return [self.blocks[number] for number in range(start, start + size)]

    def reaching(self, images: Tensor, choices: Sequence[Tensor]) -> Tensor:
        """Tokens (B, T, C) that reach the next group after those whose choices (B, T) these are."""
        x, start = self.embed(images), 0
        for kept, size in zip(choices, self.groups, strict=False):
            x = _through(self._group(start, size), x * kept.unsqueeze(-1).to(x.dtype), kept)
            start += size
        return x


def _through(blocks: Sequence[nn.Module], x: Tensor, kept: Tensor | None) -> Tensor:
    """Tokens (B, T, C) through blocks in which only the kept ones (B, T) are seen."""
    for module in blocks:
        block = cast(Block, module)
        mask = {} if kept is None else {"attn_mask": kept}
        x = x + block.drop_path(block.attn(block.norm1(x), **mask))
        x = x + block.drop_path(block.mlp(block.norm2(x)))
    return x


def _through_pack(blocks: Sequence[nn.Module], pack: Pack) -> Tensor:
    """The tokens of all images end to end, (T, C), through blocks that look within each image."""
    x = pack.tokens
    for module in blocks:
        block = cast(Block, module)
        x = x + block.drop_path(attend_packed(block.attn, block.norm1(x), pack.cu_seq, pack.shape[1]))
        x = x + block.drop_path(block.mlp(block.norm2(x)))
    return x
