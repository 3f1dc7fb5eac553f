"""Clusters of keys by their moments, near ones by their tokens."""
