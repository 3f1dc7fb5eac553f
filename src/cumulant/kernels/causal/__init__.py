"""Causal attention of order 2 and 3."""
