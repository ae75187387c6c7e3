"""Pictures: attention masks, codebook sheets, curves, segmentation overlays, the demo's report."""
