_base_ = [
    "../_base_/models/token-mlp.py",
    "../_base_/datasets/imagenet_grids_dalle.py",
    "../_base_/schedules/tokens_adamw_coslr-100e.py",
    "../_base_/default_runtime.py",
]
