"""Chains of commands: the demo, and the paper's tables."""
