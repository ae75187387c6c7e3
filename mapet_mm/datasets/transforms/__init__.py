"""Token grids and masks in data pipelines."""
