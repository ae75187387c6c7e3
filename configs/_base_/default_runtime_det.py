# Runtime of detection (MMDetection), counted in epochs.
_base_ = "default_runtime.py"

default_scope = "mmdet"
default_hooks = dict(
    logger=dict(interval=50),
    checkpoint=dict(interval=1),
    visualization=dict(_delete_=True, type="mmdet.DetVisualizationHook"),
    compile=None,  # images have many sizes
)
visualizer = dict(type="DetLocalVisualizer", name="visualizer")
