"""Batches for a model of transformers, by the names that its forward pass takes and what its config says.

Shape legend: B batch, L tokens, C channels, H and W sides of an image, T frames or steps.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..train.files import read_json
from .batches import evaluating, placed
from .pictures import SIDE, B, L, images, pair

SAMPLES = 16000  # of sound: a second
CELLS = 4  # sides of a grid of patches, where any will do
PICTURES = ("pixel_values", "image_grid_thw", "image_sizes", "bbox")
VOCABULARIES = ("vocab_size", "input_vocab_size", "num_hash_buckets", "text_encoder_vocab_size")
WORDS = ("input_ids", "decoder_input_ids", "qformer_input_ids")


class NamedInputs:
    """What a model may be called with."""

    def __init__(self, model: Any) -> None:
        self.model, self.config, self.main = model, model.config, model.main_input_name
        self.parts = parts_of(model.config)
        parameters = inspect.signature(model.forward).parameters.values()
        self.takes = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in ("args", "self")]
        self.needs = [p.name for p in parameters if p.name in self.takes and p.default is p.empty]
        self.random = torch.Generator().manual_seed(0)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """The likeliest first: the main input and what has no default, in its usual shape and in others; then with
        what else the class takes."""
        named = self.main if self.main in self.takes else next(iter(self.takes), self.main)
        base = dict.fromkeys((named, *self.needs))
        both = getattr(self.config, "is_encoder_decoder", False) and named not in ("decoder_input_ids",)
        if both and "decoder_input_ids" in self.takes and "decoder_input_values" not in self.takes:
            base["decoder_input_ids"] = None
        pictures = [name for name in PICTURES if name in self.takes]
        if named == "input_ids" and "pixel_values" in self.takes:
            yield from self._with_pictures(base, pictures)
        if "input_ids" in self.takes and named == "pixel_values":
            yield from self._filled({**base, "input_ids": None})
        if "input_ids" not in base and "input_ids" in self.takes and named in ("input_features", "input_values"):
            yield from self._filled({**base, "input_ids": None})
        yield from self._filled(base)
        for extra in EXTRAS:
            if any(name in self.takes for name in extra) and not set(extra) <= set(base):
                yield from self._filled({**base, **{name: None for name in extra if name in self.takes}})
        if "input_ids" in self.takes and named != "input_ids":
            yield from self._filled({"input_ids": None})

    def _filled(self, names: dict[str, None]) -> Iterator[dict[str, Tensor]]:
        """The named inputs, each in its first shape, then with other shapes of the main one."""
        shapes: dict[str, list[Tensor]] = {}
        for name in names:
            maker = MAKERS.get(name)
            try:
                shapes[name] = [] if maker is None else [x for x in maker(self) if x is not None]
            except (AttributeError, TypeError, ValueError, KeyError):  # the config does not say enough
                shapes[name] = []
        if not all(shapes[name] for name in names if name in self.needs) or not any(shapes.values()):
            return
        known = {name: made for name, made in shapes.items() if made}
        usual = {name: made[0] for name, made in known.items()}
        for name, made in known.items():
            for other in made if name == next(iter(known)) else made[1:]:
                batch = {**usual, name: other}
                if "input_ids" in batch and "attention_mask" in self.takes:
                    ids = batch["input_ids"]
                    batch["attention_mask"] = torch.ones_like(ids[:, 0] if ids.ndim == 3 else ids)
                yield batch

    def _with_pictures(self, base: dict[str, None], pictures: list[str]) -> Iterator[dict[str, Tensor]]:
        """Texts with as many image words as the model makes of the pixels, which it is asked for."""
        word = self.find("image_token_id", "image_token_index")
        for some in (pictures, pictures[:1]):  # what else goes with pixels is not for all that name it
            for batch in self._filled({**base, **dict.fromkeys(some)}):
                if "input_ids" not in batch:  # the config does not tell how many words there are
                    continue
                texts = 1 if "image_grid_thw" in batch else B
                count = 0 if word is None else self._image_words({name: batch[name] for name in some if name in batch})
                if word is None:
                    yield batch
                elif count and count % texts == 0:
                    ids = torch.full((texts, count // texts), int(word))
                    ids = torch.cat((batch["input_ids"][:texts, :3], ids, batch["input_ids"][:texts, 3:]), 1)
                    shown = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == word).long()}
                    yield {**batch, "input_ids": ids, **{name: x for name, x in shown.items() if name in self.takes}}

    def _image_words(self, pixels: dict[str, Tensor]) -> int:
        """How many vectors the model makes of these pixels; 0 where it does not say."""
        see = getattr(self.model, "get_image_features", None)
        if see is None:
            return 0
        try:
            with evaluating(self.model), torch.no_grad():
                return _vectors(see(**placed(self.model, pixels)))
        except Exception:  # of the model; other pixels may do
            return 0

    def find(self, *names: str, of: Any = None) -> Any:
        """The first of these that the config or a part of it says."""
        for part in self.parts if of is None else [of]:
            for name in names:
                value = getattr(part, name, None)
                if value is not None and not isinstance(value, bool):
                    return value
        return None

    def part(self, *names: str) -> Any:
        return next((getattr(self.config, name) for name in names if getattr(self.config, name, None)), self.config)

    def noise(self, *shape: Any) -> Tensor:
        return torch.randn(*(int(side) for side in shape), generator=self.random)

    def tokens(self) -> Iterator[Tensor]:
        """(B, L) words that mean nothing special, and (B, codebooks, L) and (B codebooks, L) for sound in words."""
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        size = self.find("vocab_size", of=text) or self.find(*VOCABULARIES)
        longest = self.find("max_position_embeddings", of=text) or L
        special = {x for part in self.parts for name, x in vars(part).items() if "token_i" in name}
        usual = [word for word in range(min(int(size), 1000)) if word not in special] or [0]
        length = max(1, min(L, longest if isinstance(longest, int) and longest > 0 else L))
        made = torch.tensor(usual)[torch.randint(len(usual), (B, length), generator=self.random)]
        yield made
        books = self.find("num_codebooks", "n_codebooks", "audio_channels")
        if isinstance(books, int) and books > 1:
            yield made[:, None].repeat(1, books, 1)
            yield made[:, :, None].repeat(1, 1, books)
            yield made.repeat(books, 1)

    def pixels(self) -> Iterator[Tensor]:
        """(B, C, H, W); with frames (B, T, C, H, W); in patches of a grid; several images a text."""
        if hasattr(self.model, "timm_model"):
            yield from images(self.model.timm_model)
        source = self.part("vision_config", "image_config", "encoder", "backbone_config")
        told = _preprocessed(self.config, self.model)
        size: Any = self.find("image_size", "img_size", of=source) or self.find("image_size", "img_size", "input_size")
        size = size or told or SIDE
        channels = self.find("num_channels", "in_channels", "in_chans", of=source) or 3
        if isinstance(channels, list | tuple) or ("patch_size" in dir(source) and channels > 16):
            channels = 3
        frames = self.find("num_frames", of=source)
        if "image_grid_thw" in self.takes or "grid_thw" in self.takes:
            cells, values = math.prod(_grid(self)), _patch_values(self, source)
            yield self.noise(cells, values)
            patch = self.find("patch_size", of=source)
            if isinstance(patch, int) and values % patch**2 == 0:
                yield self.noise(cells, values // patch**2, patch, patch)
            for name, part in self.model.named_modules():  # as many as the layer takes that reads them
                if isinstance(part, nn.Linear) and "patch_embed" in name:
                    yield self.noise(cells, part.in_features)
        if "spatial_shapes" in self.takes:
            yield self.noise(B, CELLS**2, channels * int(self.find("patch_size", of=source) or 16) ** 2)
        if frames is not None:
            yield self.noise(B, frames, channels, *pair(size))
        yield self.noise(B, channels, *pair(size))
        yield self.noise(B, 1, channels, *pair(size))
        yield self.noise(B, 2, channels, *pair(size))  # two to be matched
        patch = self.find("patch_size", of=source)
        if isinstance(patch, int):
            yield self.noise(B, (pair(size)[0] // patch) ** 2, channels * patch**2)
        if pair(size) != (SIDE, SIDE):
            yield self.noise(B, channels, SIDE, SIDE)

    def clips(self) -> Iterator[Tensor]:
        source = self.part("vision_config", "video_config")
        frames = self.find("num_frames", "frames_per_clip", "max_frames", of=source) or 4
        size = self.find("image_size", "crop_size", of=source) or SIDE
        yield self.noise(B, frames, self.find("num_channels", "in_channels", "in_chans", of=source) or 3, *pair(size))

    def spectrogram(self) -> Iterator[Tensor]:
        """Features of sound, (B, F, T) as Whisper has them and (B, T, F)."""
        source = self.part("audio_config", "encoder_config", "audio_encoder_config")
        names = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size", "n_mels")
        bins = self.find(*names, "input_dim", "input_size", of=source) or self.find(*names) or 80
        places = self.find("max_source_positions", of=source)
        steps = 2 * places if isinstance(places, int) else 128
        yield self.noise(B, bins, steps)
        yield self.noise(B, steps, bins)
        yield self.noise(B, 1, steps, bins)

    def sound(self) -> Iterator[Tensor]:
        """(B, samples), (B, 1, samples), or (B, T, F) where the config has frames of a spectrogram."""
        bins, length = self.find("num_mel_bins"), self.find("max_length")
        if isinstance(bins, int) and isinstance(length, int):
            yield self.noise(B, length, bins)
        yield self.noise(B, SAMPLES)
        yield self.noise(B, 1, SAMPLES)

    def vectors(self, *names: str, length: int = L) -> Iterator[Tensor]:
        names = names or ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        yield self.noise(B, length, self.find(*names, of=text) or self.find(*names))

    def patches(self) -> Iterator[Tensor]:
        """Patches of a grid, one below the other, as vision towers of their own take them."""
        yield self.noise(math.prod(_grid(self)), _patch_values(self, self.config))

    def series(self) -> Iterator[Tensor]:
        """The past of a time series: as long as the context and the longest lag."""
        length = self.find("context_length") or 32
        lags = self.find("lags_sequence") or [0]
        channels = self.find("num_input_channels", "input_size") or 1
        if self.find("lags_sequence"):
            yield self.noise(B, length + max(lags))
        yield self.noise(B, length, channels)
        yield self.noise(B, length)

    def covariates(self, future: bool) -> Iterator[Tensor]:
        length = self.find("prediction_length") if future else (self.find("context_length") or 32)
        lags = 0 if future else max(self.find("lags_sequence") or [0])
        yield self.noise(B, (length or 0) + lags, self.find("num_time_features") or 0)


def parts_of(config: Any) -> list[Any]:
    """The config and all within it, the outermost first."""
    found = [config]
    for part in found:
        for name in getattr(part, "sub_configs", {}):
            inner = getattr(part, name, None)
            if inner is not None and hasattr(inner, "to_dict"):
                found.append(inner)
    return found


def _preprocessed(config: Any, model: Any) -> Any:
    """The size of images that preprocessor_config.json, beside the weights that were loaded, names."""
    file = Path(str(getattr(model, "name_or_path", "") or "none")) / "preprocessor_config.json"
    try:
        given = read_json(file) if file.is_file() else {}
    except (OSError, ValueError):
        return None
    return given.get("crop_size") or given.get("size")


def _grid(words: NamedInputs) -> tuple[int, int, int]:
    merge = words.find("spatial_merge_size", "merge_size") or 2
    side = 2 * (merge if isinstance(merge, int) else merge[-1])
    return 1, side, side


def _patch_values(words: NamedInputs, source: Any) -> int:
    patch = words.find("patch_size", of=source) or words.find("patch_size") or 14
    times = words.find("temporal_patch_size", of=source) or 1
    channels = words.find("in_channels", "in_chans", "num_channels", of=source) or 3
    return int(math.prod(pair(patch)) * times * channels)


def _vectors(features: Any) -> int:
    """How many vectors of image features there are, in whatever a class gives them."""
    found = features
    if not isinstance(features, Tensor | list | tuple):
        found = getattr(features, "pooler_output", None)
        found = getattr(features, "last_hidden_state", None) if found is None else found
    if isinstance(found, Tensor):
        return found.numel() // found.shape[-1]
    return sum(_vectors(x) for x in found) if isinstance(found, list | tuple) else 0


Maker = Callable[[NamedInputs], Iterator[Tensor]]


def _one(make: Callable[[NamedInputs], Tensor]) -> Maker:
    return lambda words: iter((make(words),))


MAKERS: dict[str, Maker] = {
    **dict.fromkeys(WORDS, NamedInputs.tokens),
    "pixel_values": NamedInputs.pixels,
    "prompt_pixel_values": NamedInputs.pixels,
    "prompt_masks": NamedInputs.pixels,
    "flattened_patches": NamedInputs.pixels,
    "pixel_values_videos": NamedInputs.clips,
    "input_features": NamedInputs.spectrogram,
    "input_values": NamedInputs.sound,
    "decoder_input_values": lambda w: iter((w.noise(B, L, w.find("num_mel_bins") or 80),)),
    "audio_values": NamedInputs.sound,
    "inputs_embeds": NamedInputs.vectors,
    "query_embeds": NamedInputs.vectors,
    "hidden_states": lambda w: w.patches() if "grid_thw" in w.takes else w.vectors(),
    "encoder_hidden_states": lambda w: w.vectors("encoder_hidden_size", "hidden_size", "d_model"),
    "grid_thw": _one(lambda w: torch.tensor([_grid(w)])),
    "image_grid_thw": _one(lambda w: torch.tensor([_grid(w)])),
    "pixel_attention_mask": _one(lambda w: torch.ones(B, CELLS**2, dtype=torch.long)),
    "spatial_shapes": _one(lambda w: torch.full((B, 2), CELLS)),
    "merge_sizes": _one(lambda w: torch.tensor([2])),
    "task_inputs": _one(lambda w: next(w.tokens())[:, :1].expand(B, w.find("task_seq_len") or L)),
    "inputs": lambda w: w.vectors("d_model", "hidden_size"),
    "image_sizes": _one(lambda w: torch.tensor([pair(next(w.pixels()).shape[-2:])] * B)),
    "bbox": _one(lambda w: torch.zeros(B, L, 4, dtype=torch.long)),
    "visual_feats": _one(lambda w: w.noise(B, 4, w.find("visual_feat_dim"))),
    "visual_pos": _one(lambda w: torch.rand(B, 4, w.find("visual_pos_dim") or 4, generator=w.random)),
    "visual_embeds": _one(lambda w: w.noise(B, 4, w.find("visual_embedding_dim"))),
    "past_values": NamedInputs.series,
    "past_observed_mask": _one(lambda w: torch.ones_like(next(w.series()))),
    "past_time_features": lambda w: w.covariates(False),
    "future_time_features": lambda w: w.covariates(True),
    "future_values": lambda w: iter((w.noise(B, w.find("prediction_length")),)),
    "states": _one(lambda w: w.noise(B, L, w.find("state_dim"))),
    "actions": _one(lambda w: w.noise(B, L, w.find("act_dim"))),
    "rewards": _one(lambda w: w.noise(B, L, 1)),
    "returns_to_go": _one(lambda w: w.noise(B, L, 1)),
    "timesteps": _one(lambda w: torch.arange(L).expand(B, L)),
    "padding_mask": _one(lambda w: torch.ones(B, SAMPLES, dtype=torch.bool)),
    "input_features_mask": _one(lambda w: torch.ones(B, next(w.spectrogram()).shape[-1], dtype=torch.long)),
    "qformer_attention_mask": _one(lambda w: torch.ones(B, L, dtype=torch.long)),
}
# What a class may want besides, though it has a default: one of these together, in this order.
EXTRAS: tuple[tuple[str, ...], ...] = (
    ("decoder_input_ids",),
    ("attention_mask",),
    ("pixel_values",),
    ("bbox", "pixel_values"),
    ("bbox",),
    ("inputs_embeds",),
    ("input_features",),
    ("input_features", "input_features_mask"),
    ("input_values",),
    ("pixel_values_videos",),
    ("pixel_values", "pixel_attention_mask", "spatial_shapes"),
    ("visual_feats", "visual_pos"),
    ("encoder_hidden_states",),
    ("decoder_input_values",),
    ("prompt_pixel_values", "prompt_masks"),
    ("past_time_features", "past_observed_mask", "future_values", "future_time_features"),
    ("states", "actions", "rewards", "returns_to_go", "timesteps"),
)
