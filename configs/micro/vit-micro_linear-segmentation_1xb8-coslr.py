# Linear segmentation of a frozen ViT on few labelled scenes: the normalised patch tokens of the last layer,
# dropout, BatchNorm and a 1 x 1 convolution. The checkpoint goes into `model.backbone.init_cfg.checkpoint`
# (--cfg-options).
_base_ = "vit-micro_upernet_1xb8-poly.py"

model = dict(
    backbone=dict(out_indices=[3], frozen_stages=4),
    neck=dict(_delete_=True, type="mapet_mm.BatchNormNeck", channels=_base_.arch.embed_dims, dropout=0.1),
    decode_head=dict(
        _delete_=True,
        type="FCNHead",
        num_convs=0,
        concat_input=False,
        in_channels=_base_.arch.embed_dims,
        in_index=0,
        channels=_base_.arch.embed_dims,
        dropout_ratio=0.0,
        num_classes=len(_base_.scene_classes),
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, class_weight=_base_.scene_class_weights),
    ),
)

optim_wrapper = dict(
    _delete_=True, optimizer=dict(type="AdamW", fused=True, lr=1e-3, betas=(0.9, 0.999), weight_decay=1e-3)
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, begin=0, end=20, by_epoch=False),
    dict(type="CosineAnnealingLR", eta_min=0.0, begin=20, end=_base_.upernet_iterations, by_epoch=False),
]
