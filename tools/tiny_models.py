"""Every model class of transformers with a tiny configuration: its default one, every size in it made small.

Sizes of one kind are given one value wherever they stand, so that parts that had to fit each other still do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

LENGTH, WORDS, WIDTH, HEADS, LAYERS = 128, 128, 32, 4, 2
LARGEST = 20_000_000  # parameters; more is not tiny

# The first rule whose pattern is found in a name gives the value; None leaves the size as it is.
RULES: tuple[tuple[str, int | None], ...] = (
    (r"groups$|n_group$", HEADS),
    (r"kernel|stride|dilation|ratio|factor|coefficient|cost|temperature|theta|base$|tubelet|downsample_rate", None),
    (r"attn_layer_(period|offset)|expert_layer_(period|offset)|^sparse_step", None),
    (r"topk_group$|^group_size|window|vision_feature_layer", None),
    (r"shared_layers$|num_nextn|mtp", 0),
    (r"^num_feat_extract_layers|lstm_layers|adapter_layers|bits$|^num_labels|^num_channels|in_chans|points?$", None),
    (r"vocab", WORDS),
    (r"(experts?_per_tok|per_token|top_?k|experts_per_tok|moe_k)$", 2),
    (r"(num|n)_(local_|routed_|moe_)?experts$|^moe_num_experts$", 4),
    (r"shared_experts?$", 1),
    (r"(^|_)(key_value|kv)_heads$|num_key_value|_kv_heads$", 2),
    (r"heads?$|^n_head", HEADS),
    (r"rotary_dim", 4),
    (r"head_dim|^d_kv$|head_size|dim_head|d_head|pos_feats", 8),
    (r"lora_rank|rank$", 8),
    (r"layers?$|depth$|num_blocks?$|n_layer|num_stacks", LAYERS),
    (r"(intermediate|ffn|feed_?forward|_ff$|mlp|inner)", 2 * WIDTH),
    (r"image_size|^img_size|^input_size|pretrain_image_size|image_resolution", 32),
    (r"patch_size", 8),
    (r"max_.*position|n_positions|max_.*length|max_seq|context_length|block_size", LENGTH),
    (r"(fpn|mask)_feature_size", WIDTH),
    (r"mel_bins|feature_size|num_mel", 16),
    (r"hidden|d_model|n_embd|embed|dim$|width|channels?$|size_global|projection|_size_?\d?$|units$|features$", WIDTH),
    (r"num_quer(y|ies)", 8),
)
IDS = re.compile(r"(token_id|token_index|_id|token_ids)$")
DERIVED = (
    "qk_head_dim",
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "no_rope_layers",
    "id2label",
    "label2id",
    "stage_names",
)
DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")

# What no rule on names can know: sizes that must fit each other, and defaults that make no model.
_STATE = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
_RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
_DETECTOR = {"use_timm_backbone": False, "backbone": None, "backbone_config": {**_RESNET, "out_features": ["stage4"]}}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}
_ROTARY = {"rope_parameters": _AXES}
_IN_AXES = ("Glm4v", "Glm4vMoe", "GlmImage", "GlmOcr", "Qwen2VL", "Qwen2_5_VL")
GIVEN: dict[str, dict[str, Any]] = {
    **dict.fromkeys([f"{name}TextConfig" for name in (*_IN_AXES, "PaddleOCR")], _ROTARY),
    **dict.fromkeys(("ConditionalDetrConfig", "DabDetrConfig", "DetrConfig", "TableTransformerConfig"), _DETECTOR),
    "AlignVisionConfig": {"width_coefficient": 1.0},
    "AutoformerConfig": {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2], "label_length": 4},
    "BrosConfig": {"hidden_size": 128},
    "BambaConfig": {**_STATE, "attn_layer_indices": [1]},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 100}},
    "CvtConfig": {"depth": [1, 2, 3], "num_heads": [1, 2, 4], "drop_path_rate": [0.0, 0.0, 0.0]},
    "DeepseekV2Config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "Dots1Config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "EsmConfig": {"vocab_size": WORDS, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"},
    "EsmcConfig": {"num_key_value_heads": HEADS},
    "FalconH1Config": {**_STATE, "mamba_d_ssm": 64},
    "Glm5NextTextConfig": {"num_key_value_heads": HEADS, "index_topk": 16},
    "GraniteMoeHybridConfig": {**_STATE, "layer_types": ["mamba", "attention"]},
    "HieraConfig": {"patch_size": [7, 7]},
    "HunYuanDenseV1Config": {"head_dim": 8},
    "HunYuanMoEV1Config": {"head_dim": 8},
    "HunYuanVLTextConfig": {"head_dim": 8, **_ROTARY},
    "InformerConfig": {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "LayoutLMv3Config": {"coordinate_size": 4, "shape_size": 8, "input_size": 32, "patch_size": 8},
    "LEDConfig": {"attention_window": [8, 8]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "LiltConfig": {"hidden_size": 48},
    "MarkupLMConfig": dict.fromkeys(("max_xpath_tag_unit_embeddings", "max_xpath_subs_unit_embeddings"), 32)
    | {"tag_pad_id": 30, "subs_pad_id": 30},
    "Mistral4Config": {"qk_rope_head_dim": 4},
    "MoonshineConfig": {"encoder_num_key_value_heads": HEADS, "decoder_num_key_value_heads": HEADS},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "state_size": 8, "chunk_size": 16},
    "Mask2FormerConfig": {"feature_size": WIDTH},
    "MinistralConfig": {"head_dim": 8},
    "NemotronConfig": {"num_key_value_heads": 2},
    "PerceiverConfig": {"num_latents": 8, "d_latents": WIDTH, "d_model": WIDTH, "max_position_embeddings": 32},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},  # of which the third attends
    "ReformerConfig": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16], "is_decoder": True},
    "SamVisionConfig": {"num_pos_feats": WIDTH // 2},
    "SamHQVisionConfig": {"num_pos_feats": WIDTH // 2},
    "SamPromptEncoderConfig": {"image_size": 32, "patch_size": 8, "image_embedding_size": 4},
    "SamHQPromptEncoderConfig": {"image_size": 32, "patch_size": 8, "image_embedding_size": 4},
    "Step3p7TextConfig": {"sliding_window": 8},
    "TimeSeriesTransformerConfig": {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2]},
    "XmodConfig": {"default_language": "en_XX"},
    "XLNetConfig": {"d_head": 8},
}


def tiny_config(kind: Any, **given: Any) -> Any:
    """A small configuration of a class; `given` go before the rules."""
    return _tiny(kind(), **given)


def _tiny(config: Any, **given: Any) -> Any:
    kind = type(config)
    made = {**_small(config), **_whole(config), **deepcopy(GIVEN.get(kind.__name__, {})), **given}
    stages = getattr(config, "out_features", None)
    if stages and "out_features" not in made and set(stages) <= set(getattr(kind(**made), "stage_names", ())):
        made["out_features"] = list(stages)  # of a backbone: as many maps as what stands on it takes
    return kind(**made)


def _whole(config: Any) -> dict[str, Any]:
    """What fewer layers would lose: those of another kind, often all that attend."""
    kinds = vars(config).get("layer_types") or []
    other = [kind for kind in kinds if kind != kinds[0]]
    return {"layer_types": [kinds[0], other[-1]]} if other and set(kinds[:LAYERS]) == {kinds[0]} else {}


def _small(config: Any) -> dict[str, Any]:
    parts = set(getattr(config, "sub_configs", {}))
    depths = {depth for name in DEPTHS if isinstance(depth := getattr(config, name, None), int) and depth > 4}
    made: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name in DERIVED or name.startswith("_") or (name == "feature_size" and hasattr(config, "lags_sequence")):
            continue
        if isinstance(value, list | tuple) and len(value) in depths:  # one entry a layer
            value = made[name] = list(value[:LAYERS])
        if name in parts or hasattr(value, "to_dict"):
            if value is not None:
                made[name] = _tiny(value) if hasattr(value, "to_dict") else value
        elif IDS.search(name):
            made[name] = _identity(value)
        else:
            small = _sized(name, value)
            if small is not None:
                made[name] = small
    heads = vars(config).get("num_key_value_heads")
    if heads is not None and heads == getattr(config, "num_attention_heads", 0):
        made["num_key_value_heads"] = made.get("num_attention_heads", HEADS)
    return made


def _sized(name: str, value: Any) -> Any:
    """The value that the rules give to a size; None where they say nothing."""
    if isinstance(value, bool) or not isinstance(value, int | list | tuple):
        return None
    found = next((size for pattern, size in RULES if re.search(pattern, name)), None)
    if found is None:
        return None
    if isinstance(value, int):
        return min(value, found) if value >= 0 else value
    if not value or not all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        return None
    colours = [3] if value[0] == 3 and "channels" in name else []  # 3 heads would not divide a width
    return colours + [1 << (min(x, found).bit_length() - 1) if x > 0 else x for x in value[len(colours) :]]


def _identity(value: Any) -> Any:
    """A word of the small vocabulary for one of the large: small numbers stay, large ones are kept apart."""
    if isinstance(value, list | tuple):
        return [_identity(x) for x in value]
    if isinstance(value, bool) or not isinstance(value, int) or value < WORDS // 2:
        return value
    return WORDS // 2 + value % (WORDS // 2)


def tiny_model(kind: Any, seed: int = 0, **given: Any) -> Any:
    """A model of this class with random weights of a tiny configuration, in evaluation mode."""
    import torch

    config = tiny_config(kind.config_class, **given)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{kind.__name__} has {size:,} parameters with a tiny configuration")
    torch.manual_seed(seed)
    return kind(tiny_config(kind.config_class, **given)).eval()


def classes(mapping: str = "MODEL_MAPPING_NAMES") -> Iterator[str]:
    """Names of the classes in one of the mappings of transformers' `modeling_auto`, each once."""
    from transformers.models.auto import modeling_auto

    seen: set[str] = set()
    for names in getattr(modeling_auto, mapping).values():
        for name in names if isinstance(names, tuple | list) else (names,):
            if name not in seen:
                seen.add(name)
                yield name
