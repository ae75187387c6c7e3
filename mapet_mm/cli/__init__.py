"""The `mapet-mm` command."""
