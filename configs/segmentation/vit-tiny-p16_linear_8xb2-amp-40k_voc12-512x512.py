_base_ = [
    "../_base_/models/linear-segmentation_vit-tiny-p16.py",
    "../_base_/datasets/voc12_512.py",
    "../_base_/schedules/linear-segmentation_adamw_40k.py",
    "../_base_/default_runtime_seg.py",
]

model = dict(decode_head=dict(num_classes=21))
