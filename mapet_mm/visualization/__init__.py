"""Pictures: attention masks, codebook sheets, curves, segmentation overlays, verdicts, reports."""
