_base_ = [
    "../_base_/models/linear-segmentation_vit-base-p16.py",
    "../_base_/datasets/ade20k_512.py",
    "../_base_/schedules/linear-segmentation_adamw_40k.py",
    "../_base_/default_runtime_seg.py",
]
