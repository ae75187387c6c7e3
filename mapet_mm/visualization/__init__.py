"""Pictures: codebook sheets, curves, segmentation overlays, the demo's report."""
