"""A small causal language model: pre-norm blocks, rotary positions, any causal mechanism and layer, generation.

Shape legend: B texts, L tokens, V symbols of the vocabulary, C width.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import shards, zoo
from ..call import check_choice, check_count, is_whole
from ..grammar import parse
from ..nn.arguments import check_beside
from ..nn.attention import LAYER_NORM
from ..nn.registry import get_layer, number_layers
from ..nn.streams import LayerStream, Recomputed, stream_of
from ..tracing import can_be_read
from ..zoo.registry import options_of
from .mechanisms import Projecting
from .parts import Block, drop_paths, reset_extras, spread_drop_path
from .vocabulary import Vocabulary

POSITIONS = ("auto", "rotary", "learned", "none")


class CausalBlock(Block):
    """The block of a ViT in which tokens see only those before them."""

    def take(self, x: Tensor, stream: LayerStream | Recomputed) -> Tensor:
        """The same for tokens that follow those in the stream."""
        x = x + stream.step(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@options_of(Projecting, without=("in_chans",))
class LanguageModel(nn.Module):
    """Tokens (B, L) to logits of the token that follows each, (B, L, V).

    Args:
        num_classes: size V of the vocabulary; `vocabulary`, where it is given, the characters themselves (without it
            256 classes are bytes), so that `generate` reads and writes text.
        context: tokens that it is trained on at a time. Learned positions end there; rotary ones do not.
        positions: "rotary"; "learned", a table; "none", for layers with positions of their own; "auto" is rotary where
            the layer takes it, none where it says that it has its own, else learned.
        tie: the output matrix is the table of embeddings.
        attention: see `Projecting`; the mechanism must be causal. Its published parts that have no causal form
            (convolutions) are left out.
    """

    takes_text = True

    def __init__(
        self,
        *,
        num_classes: int = 256,
        vocabulary: str = "",
        context: int = 256,
        embed_dim: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        positions: str | None = "auto",
        tie: bool = True,
        gelu: str = "erf",
        **attending: Any,
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] | None = None  # set by create_model
        positions = "none" if positions is None else positions  # how a name with options writes it
        check_choice("positions", positions, POSITIONS)
        for name, count in {"num_classes": num_classes, "context": context, "depth": depth}.items():
            check_count(name, count)
        self.vocabulary = Vocabulary(vocabulary)
        if vocabulary and len(self.vocabulary) != num_classes:
            raise ValueError(f"num_classes must be the size of the vocabulary, {len(vocabulary)}, got {num_classes}")
        how = Projecting(**attending)
        place, layer, drop_rate = how.place, how.layer, how.drop_rate
        self.num_classes, self.context, self.embed_dim = num_classes, context, embed_dim
        self.streaming = get_layer(layer or "multihead").streaming
        self.positions = placing(layer or "multihead") if positions == "auto" else positions
        turned = {"rotary": True} if self.positions == "rotary" else {}
        inner = embed_dim, int(embed_dim * mlp_ratio), drop_rate, gelu, True
        mechanisms = [causal(one, context) for one in how.each(depth)]
        layers = (how.made(embed_dim, num_heads, one, **turned) for one in mechanisms)
        self.embed = nn.Embedding(num_classes, embed_dim, **place)
        learned = self.positions == "learned"
        self.pos_embed = nn.Parameter(torch.empty(context, embed_dim, **place)) if learned else None
        self.pos_drop = nn.Dropout(drop_rate)
        self.blocks = nn.Sequential(*(CausalBlock(attn, *inner, **place) for attn in layers))
        self.norm = LAYER_NORM(embed_dim, **place)
        self.head = None if tie else nn.Linear(embed_dim, num_classes, bias=False, **place)
        self.set_drop_path(how.drop_path)
        number_layers(self)
        self.reset_parameters(0.02 if how.init_std is None else how.init_std)

    def reset_parameters(self, std: float = 0.02) -> None:
        """GPT-2: normal weights of that std, those that end a branch over the root of twice the depth; biases 0."""
        last = std * (2 * len(self.blocks)) ** -0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=last if name.endswith(("attn.proj", "mlp.fc2")) else std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        reset_extras(self)
        if self.pos_embed is not None:
            nn.init.normal_(self.pos_embed, std=std)

    def set_drop_path(self, rate: float) -> None:
        """Stochastic depth that grows linearly from 0 in the first block to `rate` in the last."""
        spread_drop_path(drop_paths(self.blocks), rate)

    def forward(self, tokens: Tensor) -> Tensor:
        """Of tokens that are one part of a split context (`distributed.context_parallel`), the logits of that part."""
        after = shards.place(tokens.shape[-1])[0] if is_whole(tokens) and tokens.ndim else 0
        return self.logits(self.blocks(self.embedded(tokens, after)))

    def embedded(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Tokens (B, L), the first at place `start`, as (B, L, C)."""
        if not is_whole(tokens) or tokens.ndim != 2 or not tokens.shape[1]:
            dense = isinstance(tokens, Tensor) and not tokens.is_nested
            got = f"{tokens.dtype} {tuple(tokens.shape)}" if dense else f"{type(tokens).__name__} {tokens!r:.60}"
            raise ValueError(f"tokens must be whole numbers of shape (texts, at least 1 token), got {got}")
        check_beside("tokens", tokens, self.embed.weight)
        if can_be_read(tokens) and tokens.numel():
            low, high = (int(x) for x in torch.aminmax(tokens.long()))
            if low < 0 or high >= self.embed.num_embeddings:
                most = self.embed.num_embeddings - 1
                raise ValueError(f"tokens must be numbers from 0 to {most}, got some from {low} to {high}")
        x = self.embed(tokens.long())
        if self.pos_embed is not None:
            end = start + tokens.shape[1]
            if end > self.context:
                raise ValueError(
                    f"learned positions end after context={self.context} tokens, got {end}; make the model with a "
                    'longer context, or with positions="rotary"'
                )
            x = x + self.pos_embed[start:end]
        return self.pos_drop(x)

    def logits(self, x: Tensor) -> Tensor:
        """(B, L, C) after the last block to (B, L, V)."""
        weight = self.embed.weight if self.head is None else self.head.weight
        return F.linear(self.norm(x), weight)

    def streams(self) -> list[LayerStream | Recomputed]:
        """An empty past for each block: moments or sums where there is a stream, keys and values of softmax."""
        return [stream_of(block.attn, self.streaming) for block in self.blocks]

    def take(self, tokens: Tensor, streams: Sequence[LayerStream | Recomputed], start: int) -> Tensor:
        """Logits (B, L, V) of tokens (B, L) at places `start`, ... that follow those in the streams."""
        x = self.embedded(tokens, start)
        for block, stream in zip(self.blocks, streams, strict=True):
            x = cast(CausalBlock, block).take(x, stream)
        return self.logits(x)

    @torch.no_grad()
    def generate(
        self,
        prompt: str | Tensor,
        length: int = 200,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        cache: bool = True,
    ) -> Any:
        """The prompt with `length` further tokens: text for text, (B, L + length) for tokens (B, L) or (L,).

        `temperature=0` takes the most probable token, `top_k` draws among the k most probable ones. The same seed gives
        the same text. `cache=False` computes all tokens again for each new one, with the same result.
        """
        if not temperature >= 0 or math.isinf(temperature):
            raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1 or None, got {top_k}")
        check_count("length", length, 0)
        device = self.embed.weight.device
        tokens = self.encode(prompt) if isinstance(prompt, str) else prompt
        tokens = torch.atleast_2d(tokens).to(device)
        if not tokens.shape[1]:
            raise ValueError("prompt must hold at least one token, got none")
        dice = torch.Generator(device).manual_seed(seed)
        training, streams = self.training, self.streams() if cache else []
        self.eval()
        try:
            fresh = tokens
            for place in range(tokens.shape[1], tokens.shape[1] + length):
                seen = self.take(fresh, streams, place - fresh.shape[1]) if cache else self(tokens)
                fresh = draw(seen[:, -1], temperature, top_k, dice)
                tokens = torch.cat((tokens, fresh), 1)
        finally:
            self.train(training)
        if isinstance(prompt, str):
            return self.decode(tokens[0])
        return tokens if prompt.ndim == 2 else tokens[0]

    def encode(self, text: str) -> Tensor:
        """A text as tokens (L,)."""
        if not self.vocabulary.symbols and self.num_classes != len(self.vocabulary):
            raise ValueError(
                f"this model has {self.num_classes} classes and no vocabulary: make it with vocabulary=characters, or "
                "with num_classes=256 for bytes, or pass tokens"
            )
        return torch.tensor(self.vocabulary.encode(text), dtype=torch.long)

    def decode(self, tokens: Tensor) -> str:
        """Tokens (L,) as a text."""
        return self.vocabulary.decode(tokens.tolist())


def draw(logits: Tensor, temperature: float, top_k: int | None, dice: torch.Generator) -> Tensor:
    """A token for each row of logits (B, V), (B, 1)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=dice)


def placing(layer: str) -> str:
    """How a layer learns of places when nobody says: rotary where it takes that, none where it has its own."""
    build = get_layer(layer).build
    if getattr(build, "own_positions", False):
        return "none"
    if not getattr(build, "takes_rotary", True):
        return "learned"
    made = build.__mro__ if inspect.isclass(build) else (build,)
    return "rotary" if any("rotary" in inspect.signature(one).parameters for one in made[:-1] or made) else "learned"


def causal(arguments: dict[str, Any], context: int) -> dict[str, Any]:
    """`attention` and `attention_options` of a layer for causal rows: with what makes a prefix give the same rows."""
    name, own = parse(arguments["attention"])
    mechanism = zoo.get(name)
    mechanism.require("causal")
    options = {**mechanism.pattern_options.get("causal", {})}
    if mechanism.length_option == "max_len":
        options["max_len"] = context
    elif mechanism.length_option == "segment":
        options["segment"] = math.isqrt(context - 1) + 1
    needed = {key: value for key, value in options.items() if key not in own}
    return {**arguments, "attention_options": {**needed, **(arguments["attention_options"] or {})}}
