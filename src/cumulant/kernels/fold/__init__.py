"""The folded second-order layer."""
