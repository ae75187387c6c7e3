"""Vision Transformers, plain and with two streams."""
