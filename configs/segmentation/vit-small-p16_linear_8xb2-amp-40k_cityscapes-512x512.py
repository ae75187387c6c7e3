_base_ = [
    "../_base_/models/linear-segmentation_vit-small-p16.py",
    "../_base_/datasets/cityscapes_512.py",
    "../_base_/schedules/linear-segmentation_adamw_40k.py",
    "../_base_/default_runtime_seg.py",
]

model = dict(decode_head=dict(num_classes=19))
