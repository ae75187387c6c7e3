_base_ = [
    "../_base_/models/token-vit-tiny.py",
    "../_base_/datasets/imagenet_grids_kclip.py",
    "../_base_/schedules/tokens_adamw_coslr-100e.py",
    "../_base_/default_runtime.py",
]
