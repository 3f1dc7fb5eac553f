"""Fast paths, each compared with `Moments` in outputs and gradients."""
