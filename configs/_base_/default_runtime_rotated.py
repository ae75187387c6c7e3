# Runtime of detection with rotated boxes (MMRotate), counted in epochs.
_base_ = "default_runtime_det.py"

default_scope = "mmrotate"
visualizer = dict(type="RotLocalVisualizer")
