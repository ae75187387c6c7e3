_base_ = [
    "../_base_/models/segmenter_vit-base-p16.py",
    "../_base_/datasets/ade20k_512.py",
    "../_base_/schedules/segmentation_adamw_160k.py",
    "../_base_/default_runtime_seg.py",
]
