# BEiT's linear probe on all labels. The checkpoint goes into `model.backbone.init_cfg.checkpoint`
# (--cfg-options).
_base_ = "vit-micro-p4_1xb100-linear-coslr-200e_digits-100.py"

train_dataloader = dict(batch_size=128, dataset=dict(ann_file="meta/train.txt"))

optim_wrapper = dict(optimizer=dict(lr=2e-1))  # the features are not normalised: higher than `-linear-mean-`
param_scheduler = [dict(type="CosineAnnealingLR", begin=0, end=20, by_epoch=True, convert_to_iter_based=True)]
train_cfg = dict(max_epochs=20, val_interval=10)
