_base_ = [
    "../_base_/models/dpt_vit-base-p16.py",
    "../_base_/datasets/ade20k_512.py",
    "../_base_/schedules/segmentation_adamw_160k.py",
    "../_base_/default_runtime_seg.py",
]

# MMSegmentation's rate and decay for DPT.
optim_wrapper = dict(optimizer=dict(lr=6e-5, weight_decay=0.01))
