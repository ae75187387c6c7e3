"""Batches for pre-training: normalised images with their tokens, colours jittered on the device."""
