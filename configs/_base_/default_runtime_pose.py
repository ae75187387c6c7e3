# Runtime of pose estimation (MMPose), counted in epochs.
_base_ = "default_runtime.py"

default_scope = "mmpose"
default_hooks = dict(
    logger=dict(interval=50),
    visualization=dict(_delete_=True, type="PoseVisualizationHook", enable=False),
    compile=None,  # nobody has tried
)
visualizer = dict(type="PoseLocalVisualizer", name="visualizer")
