"""Start, resume and launch runs."""
