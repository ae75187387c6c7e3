"""Self-supervised algorithms."""
