"""Tokenizers: images to token ids."""
