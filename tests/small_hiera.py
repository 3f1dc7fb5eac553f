"""A small vision encoder of SAM 2, for the tests that convert it and that look at its masks."""

from typing import Any


def small_hiera(third: int) -> Any:
    """Its configuration: stages of 1, 1, `third` and 1 layers, of which the fourth layer sees the whole picture."""
    import transformers

    backbone = transformers.Sam2HieraDetConfig(
        hidden_size=16, num_attention_heads=1, image_size=[128, 128], blocks_per_stage=[1, 1, third, 1],
        embed_dim_per_stage=[16, 32, 64, 128], num_attention_heads_per_stage=[1, 1, 2, 4],
        window_size_per_stage=[4, 2, 2, 2], global_attention_blocks=[3],
        window_positional_embedding_background_size=[3, 3],
    )  # fmt: skip
    return transformers.Sam2VisionConfig(
        backbone_config=backbone, backbone_channel_list=[128, 64, 32, 16], fpn_hidden_size=32,
        backbone_feature_sizes=[[32, 32], [16, 16], [8, 8]],
    )  # fmt: skip
