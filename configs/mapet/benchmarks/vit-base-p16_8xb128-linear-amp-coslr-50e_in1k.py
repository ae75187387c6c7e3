_base_ = [
    "../../_base_/models/vit-base-p16_linear.py",
    "../../_base_/datasets/imagenet_linear.py",
    "../../_base_/schedules/linear_adamw_coslr-50e.py",
    "../../_base_/default_runtime.py",
]
