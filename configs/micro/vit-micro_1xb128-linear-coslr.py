# BEiT's linear probe: for each layer of the frozen ViT, a linear layer on class token and patch mean.
# The checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = ["_base_/vit-micro.py", "_base_/labels.py", "_base_/runtime.py"]

model = dict(
    type="mapet_mm.LinearProbe",
    backbone=dict(
        type="mapet_mm.MaPeTViT",
        arch=_base_.arch,
        img_size=_base_.img_size,
        patch_size=_base_.patch_size,
        out_type="raw",
        out_indices=[0, 1, 2, 3],
        final_norm=False,
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
    head=dict(
        type="mapet_mm.LayerwiseLinearHead",
        num_classes=_base_.num_classes,
        in_channels=_base_.arch.embed_dims,
        layers=4,
    ),
)

train_dataloader = dict(batch_size=128, dataset=dict(pipeline=[*_base_.load, _base_.pack]))
val_evaluator = dict(_delete_=True, type="mapet_mm.LayerwiseAccuracy")
test_evaluator = dict(_delete_=True, type="mapet_mm.LayerwiseAccuracy")

# The features are not normalised: the rate is higher than that of `-linear-mean-`.
optim_wrapper = dict(optimizer=dict(type="AdamW", fused=True, lr=2e-1, weight_decay=1e-4))
cosine = dict(type="CosineAnnealingLR", begin=0, by_epoch=True)
param_scheduler = [dict(end=_base_.probe_epochs, convert_to_iter_based=True, **cosine)]
train_cfg = dict(by_epoch=True, max_epochs=_base_.probe_epochs, val_interval=10)
val_cfg = dict()
test_cfg = dict()
