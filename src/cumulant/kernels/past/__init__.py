"""Causal cluster attention: the past by the moments of its blocks, the present token by token."""
