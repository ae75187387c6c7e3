# BEiT's linear probe on 100 labels: for each layer of the frozen ViT, a linear layer on class token and patch
# mean.
# The checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = ["_base_/vit-micro-p4.py", "_base_/digits_labels.py", "_base_/runtime.py"]

model = dict(
    type="mapet_mm.LinearProbe",
    backbone=dict(
        type="mapet_mm.MaPeTViT",
        arch=_base_.arch,
        img_size=24,
        patch_size=4,
        out_type="raw",
        out_indices=[0, 1, 2, 3],
        final_norm=False,
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
    head=dict(type="mapet_mm.LayerwiseLinearHead", num_classes=10, in_channels=96, layers=4),
)

train_dataloader = dict(
    batch_size=100,
    dataset=dict(ann_file="meta/train_100.txt", pipeline=[_base_.load, _base_.pack]),
)
val_evaluator = dict(_delete_=True, type="mapet_mm.LayerwiseAccuracy")
test_evaluator = dict(_delete_=True, type="mapet_mm.LayerwiseAccuracy")

optim_wrapper = dict(optimizer=dict(type="AdamW", fused=True, lr=4e-2, weight_decay=1e-4))
param_scheduler = [dict(type="CosineAnnealingLR", begin=0, end=200, by_epoch=True)]
train_cfg = dict(by_epoch=True, max_epochs=200, val_interval=50)
val_cfg = dict()
test_cfg = dict()
