"""One interface for all vision networks, under timm's names: features, classifier, depth, memory.

Shape legend: B images, C channels of a level, H x W pixels, S stride of a level.

A network has levels (the blocks of a ViT, the stages of a pyramid), one entry of `feature_info` each, and says

    _begin(images) -> state, at     the stem; `at` is what levels must know beside the state: a grid, say
    _levels() -> modules            in order
    _level(module, state, at)       what one does; `_run` in it saves memory where that is asked for
    _as_map(state, at)              the state as a map (B, C, H/S, W/S); itself where it is one
    _end(state, at)                 what `forward_features` returns; the last state unless said
    _pooled(features)               (B, num_features), what the classifier reads
    reset_parameters(std)           initialise; `_finish`, with which a constructor ends, calls it

from which all else here follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..call import check_choice, check_count, check_dtype, check_flag, whole
from ..nn.arguments import check_beside
from ..nn.registry import number_layers
from ..zoo.grid import square_grid
from .mechanisms import Attending
from .parts import drop_paths, reset_linear, resize_positions, spread_drop_path

FORMATS = ("NCHW", "NLC")
Apart = Mapping[str, Mapping[str, int]]  # layers -> parts of their `qkv` with their rows: {"qk": 48, "v": 24}


class FeatureInfo(list[dict[str, Any]]):
    """A level each, as timm writes them: {"num_chs": 384, "reduction": 16, "module": "blocks.5"}."""

    @classmethod
    def of(cls, levels: Iterable[tuple[int, int, str]]) -> FeatureInfo:
        """From channels, stride and name of the module of each level."""
        return cls({"num_chs": channels, "reduction": stride, "module": name} for channels, stride, name in levels)

    def channels(self) -> list[int]:
        return [level["num_chs"] for level in self]

    def reduction(self) -> list[int]:
        """Pixels from one place of the map to the next."""
        return [level["reduction"] for level in self]

    def module_name(self) -> list[str]:
        return [level["module"] for level in self]

    def taken(self, indices: int | Sequence[int] | None) -> list[int]:
        """Levels in order: all, the last so many, or those of these numbers; negative ones count from the end."""
        last = whole(indices, 1) and indices <= len(self)
        if indices is None or last:
            return list(range(len(self)))[-(cast(int, indices) or 0) :] if last else list(range(len(self)))
        many = list(indices) if isinstance(indices, Sequence) and not isinstance(indices, str) else [None]
        if not many or any(type(i) is not int or not -len(self) <= i < len(self) for i in many):
            raise ValueError(f"indices must be None, a number of levels from 1 to {len(self)}, or numbers of levels "
                             f"from {-len(self)} to {len(self) - 1}, got {indices!r}")  # fmt: skip
        return sorted({cast(int, i) % len(self) for i in many})


class Backbone(nn.Module):
    """What every vision network answers; see the head of this file for what a subclass defines."""

    feature_info: FeatureInfo
    in_chans: int
    grad_checkpointing = False
    num_prefix_tokens = 0
    init_std: float | None = 0.02
    _begin: Any
    _pooled: Any
    reset_parameters: Any

    def __init__(self, num_classes: int, num_features: int) -> None:
        super().__init__()
        self.config: dict[str, Any] | None = None  # set by create_model
        check_count("embed_dim", num_features)
        self.num_classes, self.num_features = check_classes(num_classes), num_features
        self.register_load_state_dict_pre_hook(_before_loading)

    # What a subclass may say otherwise.

    def _levels(self) -> Iterable[nn.Module]:
        return cast(Any, self).blocks

    def _level(self, level: nn.Module, state: Any, at: Any) -> Any:
        return self._run(level, state)

    def _normed(self, state: Any) -> Any:
        raise ValueError(f"norm=True, but {type(self).__name__} has no norm that fits all of its levels")

    def _set_pool(self, pool: str) -> dict[str, Any]:
        """Pool otherwise from now on; returns the arguments of `create_model` that say so."""
        raise ValueError(f"global_pool={pool!r}, but {type(self).__name__} pools in one way; leave it out")

    def position_tables(self) -> Mapping[str, tuple[int, ...]]:
        """Names of the positional tables (1, prefix + N, C), with the grid that each is made for."""
        return {}

    def _fitted(self, table: Tensor, grid: Any) -> Tensor:
        """The positional table of a checkpoint made for another (square) size, resized to this one's."""
        return resize_positions(table, square_grid(table.shape[1], self.num_prefix_tokens), grid)

    def timm_parts(self) -> Apart:
        """Layers whose `qkv` timm keeps in parts, with the rows of each."""
        return {}

    def classifiers(self) -> dict[str, int]:
        """Names of the last linear layers, with what they read: one, of `num_features`, unless a network has more."""
        return {"head": self.num_features}

    def _made_classifier(self, width: int, place: dict[str, Any]) -> nn.Module:
        return nn.Linear(width, self.num_classes, **place) if self.num_classes else nn.Identity()

    # What follows.

    def _finish(self, how: Attending) -> None:
        """The last step of every constructor."""
        self.in_chans, init_std = how.in_chans, how.init_std
        self.set_drop_path(how.drop_path)
        number_layers(self)
        number = isinstance(init_std, int | float) and not isinstance(init_std, bool) and 0 <= init_std < math.inf
        if init_std is not None and not number:
            raise ValueError(f"init_std must be a finite number that is not negative, got {init_std!r}")
        self.init_std = init_std
        self.reset_parameters(init_std)

    def checked(self, images: Tensor) -> Tensor:
        """Images (B, in_chans, H, W), or an error that says what they are instead."""
        check_dtype("images", images)
        empty = any(isinstance(side, int) and side < 1 for side in images.shape[2:])  # not symbols of an export
        if images.ndim != 4 or images.shape[1] != self.in_chans or empty:
            raise ValueError(
                f"images must have shape (batch, {self.in_chans}, height, width), got {tuple(images.shape)}"
            )
        meets = next((one for one in self.modules() if isinstance(one, nn.Conv2d | nn.Linear)), None)
        check_beside("images", images, None if meets is None else meets.weight)
        return images

    def _run(self, module: nn.Module, *given: Any, **named: Any) -> Any:
        """A call whose inner activations are computed again in the backward pass, where that was asked for."""
        if self.grad_checkpointing and self.training and torch.is_grad_enabled():
            norms = [one for one in module.modules() if isinstance(one, nn.BatchNorm2d)]
            if norms and not torch.compiler.is_compiling():
                named["context_fn"] = lambda: (nullcontext(), counted_once(norms))
            return checkpoint(module, *given, use_reentrant=False, **named)
        return module(*given, **named)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """In training keep only what goes in and out of each block, and compute the rest again: less memory, about a
        third more time, the same gradients."""
        check_flag("enable", enable)
        self.grad_checkpointing = enable

    def set_drop_path(self, rate: float) -> None:
        """Stochastic depth that grows linearly from 0 in the first block to `rate` in the last."""
        paths = drop_paths(self)
        if rate and not paths:
            raise ValueError(f"drop_path={rate!r}, but this {type(self).__name__} has no residual branch to drop")
        spread_drop_path(paths, rate)

    def _walk(self, x: Tensor, wanted: Sequence[int] = (), norm: bool = False, to_end: bool = True) -> Any:
        """What `forward_features` returns (None unless `to_end`), and the maps of the levels that are wanted."""
        state, at = self._begin(x)
        maps: list[Tensor] = []
        for index, level in enumerate(self._levels()):
            state = self._level(level, state, at)
            if index in wanted:
                maps.append(self._as_map(self._normed(state) if norm else state, at))
                if not to_end and len(maps) == len(wanted):
                    return None, maps
        return self._end(state, at), maps

    def _as_map(self, state: Any, at: Any) -> Any:
        return state

    def _end(self, state: Any, at: Any) -> Any:
        return state

    def forward_features(self, x: Tensor) -> Any:
        """What the network makes of its input before pooling."""
        return self._walk(x)[0]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        *,
        norm: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """`forward_features` and maps (B, C, H/S, W/S) of levels, whose C and S are in `feature_info`.

        Args:
            indices: which levels: all, the last so many, or these.
            norm: after the last norm of the network, where it fits them.
            output_fmt: "NCHW", or "NLC" for tokens.
            intermediates_only: maps alone; levels after the last of them are not run.
        """
        check_choice("output_fmt", output_fmt, FORMATS)
        wanted = self.feature_info.taken(indices)
        last, maps = self._walk(x, wanted, norm, to_end=not intermediates_only)
        maps = [one.flatten(2).mT for one in maps] if output_fmt == "NLC" else maps
        return maps if intermediates_only else (last, maps)

    def forward_head(self, x: Any, pre_logits: bool = False) -> Any:
        """Pooling and, unless `pre_logits`, classification of what `forward_features` gives."""
        pooled = self._pooled(x)
        return pooled if pre_logits else self.get_classifier()(pooled)

    def forward(self, x: Tensor) -> Any:
        return self.forward_head(self.forward_features(x))

    def timm_state_dict(self) -> dict[str, Tensor]:
        """The weights under timm's names, where timm has this network; `load_state_dict` takes both."""
        state = dict(self.state_dict())
        for layer, parts in self.timm_parts().items():  # the reverse of `join`
            for kind in ("weight", "bias"):
                whole = state.pop(f"{layer}.qkv.{kind}", None)
                rows = () if whole is None else whole.split(list(parts.values()))
                state.update({f"{layer}.{part}.{kind}": own for part, own in zip(parts, rows, strict=False)})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch does it, from our names or timm's; positional tables of other sizes are resized. Weights that do not
        fit are an error, which says what they are of."""
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except (RuntimeError, ValueError) as error:
            from .registry import named_after  # which imports this file

            known = named_after(self, state_dict)
            hint = f"; these weights fit create_model({known})" if known else ""
            raise type(error)(f"{error}{hint}") from None

    def get_classifier(self) -> nn.Module:
        """The last linear layer; an identity where `num_classes` is 0."""
        return self.get_submodule(next(iter(self.classifiers())))

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new, freshly drawn classifier for so many classes; 0 leaves it out. `global_pool`: another pooling."""
        told = {} if global_pool is None else self._set_pool(global_pool)
        self.num_classes = check_classes(num_classes)
        weight = next(self.parameters())
        for name, width in self.classifiers().items():
            owner, _, last = name.rpartition(".")
            fresh = self._made_classifier(width, {"device": weight.device, "dtype": weight.dtype})
            if isinstance(fresh, nn.Linear):
                reset_linear(fresh, self.init_std, (fresh.out_features,))
            setattr(self.get_submodule(owner), last, fresh)
        if self.config is not None:  # what a checkpoint is opened with
            self.config |= {"num_classes": num_classes, **told}


class Pyramid(Backbone):
    """A network whose levels are `stages` of maps, of which the mean is read."""

    stages: nn.Sequential

    def _levels(self) -> Iterable[nn.Module]:
        return self.stages

    def _begin(self, images: Tensor) -> Any:
        return self.checked(images), None

    def _pooled(self, maps: Tensor) -> Tensor:
        return maps.mean((2, 3))


class Features(nn.Module):
    """A network as a list of maps: images to [(B, C, H/S, W/S)], a level each; C and S are in `feature_info`.

    Made by `create_model(name, features_only=True, out_indices=...)`.
    """

    def __init__(self, model: Backbone, out_indices: int | Sequence[int] | None = None) -> None:
        super().__init__()
        if not isinstance(model, Backbone):
            raise TypeError(f"features come from a vision network, not from {type(model).__name__}")
        self.model, self.config = model, model.config
        self.out_indices = model.feature_info.taken(out_indices)
        self.feature_info = FeatureInfo(model.feature_info[index] for index in self.out_indices)

    def forward(self, images: Tensor) -> list[Tensor]:
        return self.model.forward_intermediates(images, self.out_indices, intermediates_only=True)

    def set_drop_path(self, rate: float) -> None:
        self.model.set_drop_path(rate)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.model.set_grad_checkpointing(enable)


def _before_loading(model: Backbone, state: dict[str, Any], name: str, *_: Any) -> None:
    join(state, model.timm_parts(), name)
    for table, grid in model.position_tables().items():
        given, own = state.get(name + table), getattr(model, table)
        if given is not None and given.shape != own.shape and given.shape[-1] == own.shape[-1]:
            state[name + table] = model._fitted(given, grid)


@contextmanager
def counted_once(norms: Sequence[nn.BatchNorm2d]) -> Iterator[None]:
    """While activations are computed again, batches are not counted again in running statistics."""
    kept = [dict(norm._buffers) for norm in norms]
    for norm, buffers in zip(norms, kept, strict=True):
        norm._buffers.update({name: one if one is None else one.clone() for name, one in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)


def check_classes(num_classes: int) -> int:
    if not whole(num_classes):
        raise ValueError(f"num_classes must be 0 (features) or positive, got {num_classes!r}")
    return num_classes


def join(state: MutableMapping[str, Tensor], apart: Apart, prefix: str = "") -> None:
    """In a state dict, make one `qkv` of the parts of every layer that has them all. In place."""
    for layer, parts in apart.items():
        for kind in ("weight", "bias"):
            names = [f"{prefix}{layer}.{part}.{kind}" for part in parts]
            if all(name in state for name in names):
                state[f"{prefix}{layer}.qkv.{kind}"] = torch.cat([state.pop(name) for name in names])
