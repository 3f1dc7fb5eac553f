"""What a converted layer is: attention of transformers, timm or our own models with another mechanism inside.

`choice` says what a layer computes; `own`, `timm_layers` and `hf` compute it in each kind of model; `plan` puts the
choices for a whole model in and takes them out again. Which layers get what is decided in `cumulant.conversion`.
"""
