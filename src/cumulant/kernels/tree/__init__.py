"""The order of a tree of tokens, without leaving the GPU."""
