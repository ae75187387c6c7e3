"""Pictures of what the suite does: attention masks, codebook sheets, curves, overlays, the demo's report."""
