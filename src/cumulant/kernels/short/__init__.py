"""Short clusters, token by token."""
