# The simple linear probe on few labels. The checkpoint goes into `model.backbone.init_cfg.checkpoint`
# (--cfg-options).
_base_ = "vit-micro_1xb128-linear-mean-coslr.py"

train_dataloader = dict(
    batch_size=100,
    dataset=dict(_delete_=True, pipeline=[*_base_.load, _base_.pack], **_base_.few_images),
)

optim_wrapper = dict(optimizer=dict(lr=4e-2))
param_scheduler = [dict(end=_base_.few_probe_epochs, **_base_.cosine)]
train_cfg = dict(max_epochs=_base_.few_probe_epochs, val_interval=50)
