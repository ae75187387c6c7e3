# No pre-training: the whole ViT and the linear layer from random weights.
_base_ = "vit-micro_linear-segmentation_1xb8-coslr.py"

# With the 100 digits of `digits_pixels` as many images as in a pre-training and its fine-tuning together:
# 16 x 1,437 + 500 x 8, in batches of 8.
scratch_iterations = 3374

model = dict(backbone=dict(frozen_stages=-1, drop_path_rate=0.1, init_cfg=None))

optim_wrapper = dict(optimizer=dict(weight_decay=0.05))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, begin=0, end=20, by_epoch=False),
    dict(type="CosineAnnealingLR", eta_min=0.0, begin=20, end=scratch_iterations, by_epoch=False),
]
train_cfg = dict(max_iters=scratch_iterations, val_interval=1000)
