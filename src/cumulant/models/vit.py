"""The Vision Transformer (Dosovitskiy et al. 2021) in the form that DeiT trains, with any attention.

Shape legend: B images, N = (H/P)(W/P) patches, T = prefix + N tokens, C width.
State-dict names are timm's: cls_token, pos_embed, patch_embed.proj, norm, head and
blocks.N.{norm1, attn.qkv, attn.proj, norm2, mlp.fc1, mlp.fc2}.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import check_choice, check_count, check_dtype, check_flag, check_share
from ..nn import create_layer
from ..nn.attention import EXTRAS, LAYER_NORM, check_extras
from ..nn.registry import number_layers
from ..zoo.grid import square_grid
from .mechanisms import by_block


class PatchEmbed(nn.Module):
    """Images (B, channels, H, W) to patch tokens (B, N, C): a convolution with kernel = stride = P."""

    def __init__(self, patch_size: int, in_chans: int, dim: int, **place: Any) -> None:
        super().__init__()
        self.patch_size, self.in_chans = patch_size, in_chans
        self.proj = nn.Conv2d(in_chans, dim, kernel_size=patch_size, stride=patch_size, **place)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches in an image; its sides must be multiples of the patch size."""
        if height % self.patch_size or width % self.patch_size or height < 1 or width < 1:
            raise ValueError(
                f"image size must be a multiple of the patch size {self.patch_size}, got {height} x {width}"
            )
        return height // self.patch_size, width // self.patch_size

    def forward(self, images: Tensor) -> Tensor:
        self.grid(*images.shape[-2:])
        return as_product(self.proj, images)


def as_product(proj: nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """A convolution with kernel = stride as one matrix product: x (B, channels, ...) to tokens (B, N, C).

    The cells are laid out as rows; neither im2col nor a layout of a convolution library comes between.
    """
    cells = [(side // part, part) for side, part in zip(x.shape[2:], proj.kernel_size, strict=True)]
    cut = x.reshape(*x.shape[:2], *(size for cell in cells for size in cell))
    rows = cut.permute(0, *range(2, cut.ndim, 2), 1, *range(3, cut.ndim, 2))
    return F.linear(rows.reshape(x.shape[0], math.prod([n for n, _ in cells]), -1), proj.weight.flatten(1), proj.bias)


class Mlp(nn.Module):
    """Linear, GELU ("erf", the exact one, or its "tanh" approximation), Linear. Cost: 2 L C hidden."""

    def __init__(self, dim: int, hidden: int, drop: float = 0.0, gelu: str = "erf", **place: Any) -> None:
        super().__init__()
        if gelu not in ("erf", "tanh"):
            raise ValueError(f'gelu must be "erf" or "tanh", got {gelu!r}')
        self.fc1 = nn.Linear(dim, hidden, **place)
        self.act = nn.GELU("none" if gelu == "erf" else "tanh")
        self.fc2 = nn.Linear(hidden, dim, **place)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class DropPath(nn.Module):
    """Stochastic depth: in training, a sample's branch is 0 with probability `rate`, else over 1 - rate.

    `rescale=False` leaves what is kept as it is.
    """

    keep: Tensor

    def __init__(self, rate: float = 0.0, rescale: bool = True) -> None:
        super().__init__()
        # A tensor, so that blocks which differ in their rate alone share one compiled graph.
        self.register_buffer("keep", torch.ones(()), persistent=False)
        self.rescale = rescale
        self.rate = rate

    def reset_parameters(self) -> None:
        """Write the buffer again: a model that was made on the meta device has nothing in it."""
        self.keep.fill_(1.0 - self._rate)

    @property
    def rate(self) -> float:
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._rate, self.active = rate, rate > 0
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.active:
            return x
        kept = torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), device=x.device) < self.keep
        return x * (kept / self.keep if self.rescale else kept).to(x.dtype)

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3g}"


class Block(nn.Module):
    """Pre-norm block: x + DropPath(attn(norm1(x))), then x + DropPath(mlp(norm2(x)))."""

    def __init__(
        self,
        attn: nn.Module,
        dim: int,
        hidden: int,
        drop: float = 0.0,
        gelu: str = "erf",
        is_causal: bool = False,
        **place: Any,
    ) -> None:
        super().__init__()
        self.causal = {"is_causal": True} if is_causal else {}
        self.norm1 = LAYER_NORM(dim, **place)
        self.attn = attn
        self.drop_path = DropPath()
        self.norm2 = LAYER_NORM(dim, **place)
        self.mlp = Mlp(dim, hidden, drop, gelu, **place)

    def forward(self, x: Tensor, grid: tuple[int, ...] | None = None, prefix: int = 0) -> Tensor:
        """x (B, prefix + patches, C), the patches laid out as `grid`."""
        x = x + self.drop_path(self.attn(self.norm1(x), grid=grid, prefix=prefix, **self.causal))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Backbone(nn.Module):
    """What image and video models share: tables, initialisation, blocks in a row, pooling and head.

    A subclass makes `patch_embed`, `grid_size`, `pos_embed` and `blocks`, then calls `_finish`.
    """

    poolings: tuple[str, ...] = ("cls", "gap")
    patch_embed: Any
    grid_size: Any
    pos_embed: nn.Parameter
    pos_drop: nn.Module
    blocks: nn.Sequential
    forward_features: Any
    forward_head: Any

    def __init__(self, num_classes: int, embed_dim: int, pool: str, prefix: int, **counts: int) -> None:
        super().__init__()
        self.config: dict[str, Any] | None = None  # set by create_model
        check_choice("pool", pool, self.poolings)
        for name, count in {"embed_dim": embed_dim, **counts}.items():
            check_count(name, count)
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 0:
            raise ValueError(f"num_classes must be 0 (features) or positive, got {num_classes!r}")
        self.num_classes, self.embed_dim, self.pool, self.num_prefix_tokens = num_classes, embed_dim, pool, prefix

    def _table(self, rows: int, place: dict[str, Any]) -> nn.Parameter:
        return nn.Parameter(torch.empty(1, rows, self.embed_dim, **place))

    def _head(self, place: dict[str, Any]) -> nn.Module:
        return nn.Linear(self.embed_dim, self.num_classes, **place) if self.num_classes else nn.Identity()

    def _finish(self, drop_path: float, init_std: float | None) -> None:
        self.set_drop_path(drop_path)
        number_layers(self)
        number = isinstance(init_std, int | float) and not isinstance(init_std, bool) and 0 <= init_std < math.inf
        if init_std is not None and not number:
            raise ValueError(f"init_std must be a finite number that is not negative, got {init_std!r}")
        self.reset_parameters(init_std)
        self.register_load_state_dict_pre_hook(_resize_loaded_positions)

    def reset_parameters(self, std: float | None = 0.02) -> None:
        """DeiT: truncated normal of that std for linear weights, tokens and positions; biases 0, norms 1.

        None is as ViViT was released. The patch convolution keeps PyTorch's default.
        """
        stacked = {f"{name}.qkv": module.widths for name, module in self.named_modules() if hasattr(module, "widths")}
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                _reset_linear(module, std, stacked.get(name, (module.out_features,)))
                if std is None and name.endswith((".fc1", ".fc2")):
                    nn.init.normal_(module.bias, std=1e-6)
            elif isinstance(module, nn.LayerNorm | nn.Conv2d | DropPath):
                module.reset_parameters()
        for module in self.modules():  # after the linear layers inside them
            reset = getattr(module, "reset_extras", None)
            if callable(reset):
                reset()
        for name, table in self.named_parameters(recurse=False):
            if std is not None:
                nn.init.trunc_normal_(table, std=std)
            elif name.endswith("pos_embed"):
                nn.init.normal_(table, std=0.02)
            else:
                nn.init.zeros_(table)

    def set_drop_path(self, rate: float) -> None:
        """Stochastic depth that grows linearly from 0 in the first block to `rate` in the last."""
        spread_drop_path(self.blocks, rate)

    def _with_positions(self, x: Tensor, tokens: Iterable[Tensor | None], positions: Tensor) -> Tensor:
        """x (B, N, C) behind those of the tokens that there are, with their positions."""
        prefix = [token.expand(x.shape[0], -1, -1) for token in tokens if token is not None]
        return self.pos_drop(torch.cat([*prefix, x], dim=1) + positions)

    def _encode(self, x: Tensor, grid: tuple[int, ...], blocks: Iterable[nn.Module]) -> Tensor:
        for block in blocks:
            x = block(x, grid=grid, prefix=self.num_prefix_tokens)
        return x

    def _fitted(self, table: Tensor) -> Tensor:
        """The positional table of a checkpoint made for another (square) size, resized to this one's."""
        return resize_positions(table, square_grid(table.shape[1], self.num_prefix_tokens), self.grid_size)

    def _pooled(self, tokens: Tensor) -> Tensor:
        if self.pool == "gap":
            return tokens[:, self.num_prefix_tokens :].mean(1)
        return tokens[:, 0 if self.pool == "cls" else -1]

    def forward(self, x: Tensor) -> Any:
        return self.forward_head(self.forward_features(x))


class VisionTransformer(Backbone):
    """Images (B, in_chans, H, W) to logits (B, num_classes), or to features (B, C) with `num_classes=0`.

    Args:
        img_size: side (or height and width) that the positional table is made for. Other multiples of the
            patch size work too: the table is then resized bicubically on the way.
        pool: "cls" reads the class token, "gap" the mean of the patch tokens, "last" the last of them.
        is_causal: each token sees itself and those before it, row by row of the image. The last one has then seen all
            (`pool="last"`), the class token, which comes first, nothing but itself.
        class_token: whether there is a class token; by default only for pool="cls".
        distilled: DeiT's distillation token and second head. The answer is the mean of both heads, or
            the pair while training with `distilled_training=True`.
        drop_path: stochastic depth of the last block; it grows linearly from 0 at the first.
        gelu: "erf", or "tanh" for the approximation that Google's code uses.
        init_std: of the initial linear weights, tokens and positions. DeiT's 0.02 is made for widths of hundreds;
            a model of width 64 starts learning much sooner from about 64**-0.5.
        attention: name of a mechanism, see `cumulant.zoo.names()`; options may stand behind it, "cumulant3+full".
            Or one for each block: a list of names, or a text, "4xagent,8xsoftmax".
        attention_options: options of that mechanism; of several, each takes those that it has.
        attention_extras: further arguments of every layer: num_kv_heads, v_conv, v_conv_init, gate and temperature.
        layer: name of an attention layer, see `cumulant.nn.layers()`; "multihead" unless given.
    """

    poolings = ("cls", "gap", "last")

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        attention: str | Sequence[str] = "softmax",
        attention_options: dict[str, Any] | None = None,
        attention_extras: dict[str, Any] | None = None,
        layer: str | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        is_causal: bool = False,
        pool: str = "cls",
        class_token: bool | None = None,
        distilled: bool = False,
        distilled_training: bool = False,
        drop_rate: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        gelu: str = "erf",
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        class_token = pool == "cls" if class_token is None else class_token
        prefix = int(class_token) + int(distilled)
        super().__init__(num_classes, embed_dim, pool, prefix, patch_size=patch_size, in_chans=in_chans, depth=depth)
        check_flag("is_causal", is_causal)
        check_share("drop_rate", drop_rate)
        if pool == "cls" and not class_token:
            raise ValueError('pool="cls" reads the class token, but class_token=False; use pool="gap"')
        if is_causal and pool == "cls":
            raise ValueError(
                'pool="cls" reads the first token, which with is_causal=True sees only itself; use pool="last" or "gap"'
            )
        if distilled and pool != "cls":
            raise ValueError(f'distilled=True needs pool="cls", got pool={pool!r}')
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.distilled_training = distilled_training
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim, **place)
        self.grid_size = self.patch_embed.grid(*pair(img_size))
        self.cls_token = self._table(1, place) if class_token else None
        self.dist_token = self._table(1, place) if distilled else None
        self.pos_embed = self._table(prefix + math.prod(self.grid_size), place)
        self.pos_drop = nn.Dropout(drop_rate)

        given: dict[str, Any] = {"qkv_bias": qkv_bias, "qk_norm": qk_norm, "attn_drop": attn_drop}
        given |= {"proj_drop": drop_rate, **place}
        given |= {"grid_size": self.grid_size, "prefix": prefix, **checked_extras(attention_extras, layer)}
        inner = embed_dim, hidden_width(embed_dim, mlp_ratio), drop_rate, gelu, is_causal
        mechanisms = by_block(attention, attention_options, depth)
        layers = (create_layer(layer or "multihead", embed_dim, num_heads, **one, **given) for one in mechanisms)
        self.blocks = nn.Sequential(*(Block(attn, *inner, **place) for attn in layers))
        self.norm = LAYER_NORM(embed_dim, **place)
        self.head = self._head(place)
        if distilled:
            self.head_dist = self._head(place)
        self._finish(drop_path, init_std)

    def embed(self, images: Tensor) -> Tensor:
        """Tokens with their positions, (B, T, C)."""
        check_dtype("images", images)
        if images.ndim != 4 or images.shape[1] != self.patch_embed.in_chans:
            raise ValueError(
                f"images must have shape (batch, {self.patch_embed.in_chans}, height, width), got {tuple(images.shape)}"
            )
        positions = resize_positions(self.pos_embed, self.grid_size, self.patch_embed.grid(*images.shape[-2:]))
        return self._with_positions(self.patch_embed(images), (self.cls_token, self.dist_token), positions)

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens after the last block and norm, (B, T, C)."""
        x, grid = self.embed(images), self.patch_embed.grid(*images.shape[-2:])
        return self.norm(self._encode(x, grid, self.blocks))

    def forward_head(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Pooling and classification of tokens (B, T, C)."""
        logits = self.head(self._pooled(tokens))
        if self.dist_token is None:
            return logits
        distilled = self.head_dist(tokens[:, 1])
        if self.distilled_training and self.training:
            return logits, distilled
        return (logits + distilled) / 2


def spread_drop_path(blocks: Iterable[nn.Module], rate: float, rescale: bool = True) -> None:
    """Stochastic depth of an encoder's blocks: linear from 0 in the first to `rate` in the last."""
    if not isinstance(rate, int | float) or not 0.0 <= rate < 1.0:
        raise ValueError(f"drop_path must be at least 0 and below 1, got {rate!r}")
    paths = [cast(Block, block).drop_path for block in blocks]
    last = max(1, len(paths) - 1)
    for index, path in enumerate(paths):
        path.rate, path.rescale = rate * (index / last), rescale


def resize_positions(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """A positional table (1, prefix + old rows x cols, C) for a grid of `new` rows and columns.

    The grid part is interpolated bicubically (with antialiasing, as timm does); the rows of class and
    distillation token stay.
    """
    # Sizes that an export leaves open are symbols: to compare them would fix them.
    if all(isinstance(side, int) for side in new) and old == new:
        return table
    prefix, grid = table.tensor_split([table.shape[1] - math.prod(old)], dim=1)
    image = grid.mT.unflatten(-1, old).to(torch.promote_types(table.dtype, torch.float32))
    image = F.interpolate(image, size=new, mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([prefix, image.flatten(2).mT.to(table.dtype)], dim=1)


def _resize_loaded_positions(model: Backbone, state: dict[str, Any], name: str, *_: Any) -> None:
    """Before loading: fit the positional table of a checkpoint made for another size."""
    table = state.get(f"{name}pos_embed")
    if table is not None and table.shape != model.pos_embed.shape and table.shape[-1] == model.embed_dim:
        state[f"{name}pos_embed"] = model._fitted(table)


def _reset_linear(linear: nn.Linear, std: float | None, parts: tuple[int, ...]) -> None:
    """Truncated normal, or Xavier-uniform for each of the matrices of so many rows stacked in this one; biases 0."""
    if std is not None:
        nn.init.trunc_normal_(linear.weight, std=std)
    else:
        for part in linear.weight.split(parts):
            nn.init.xavier_uniform_(part)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def pair(size: int | tuple[int, int], name: str = "img_size") -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else size
    whole = isinstance(sides, tuple | list) and all(type(side) is int and side > 0 for side in sides)
    if not whole or len(sides) != 2:
        raise ValueError(f"{name} must be a positive number of pixels, or height and width, got {size!r}")
    return sides[0], sides[1]


def hidden_width(dim: int, mlp_ratio: float) -> int:
    """Channels inside an MLP."""
    number = isinstance(mlp_ratio, int | float) and not isinstance(mlp_ratio, bool) and 0 < mlp_ratio < math.inf
    if not number or int(dim * mlp_ratio) < 1:
        raise ValueError(f"mlp_ratio must be a positive number, got {mlp_ratio!r}")
    return int(dim * mlp_ratio)


def checked_extras(extras: dict[str, Any] | None, layer: str | None) -> dict[str, Any]:
    """The extras, which are those of "multihead" unless another layer is named: that one checks its own."""
    if layer is None:
        check_extras(extras or {}, EXTRAS)
    return dict(extras or {})
