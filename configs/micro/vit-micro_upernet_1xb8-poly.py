# UperNet on few labelled scenes, cut to squares in training and evaluated whole.
# The checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = ["_base_/vit-micro.py", "_base_/data.py", "../_base_/default_runtime_seg.py"]

norm_cfg = dict(type="BN", requires_grad=True)
model = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(
        type="SegDataPreProcessor",
        mean=_base_.mean,
        std=_base_.std,
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=(_base_.scene_crop, _base_.scene_crop),
    ),
    backbone=dict(
        type="mapet_mm.MaPeTViT",
        arch=_base_.arch,
        img_size=_base_.scene_crop,
        patch_size=_base_.patch_size,
        out_type="featmap",
        out_indices=[0, 1, 2, 3],
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
    # The finest level has half the resolution of the image: the patches are small.
    neck=dict(
        type="Feature2Pyramid",
        embed_dim=_base_.arch.embed_dims,
        rescales=[2, 1, 0.5, 0.25],
        norm_cfg=norm_cfg,
    ),
    decode_head=dict(
        type="UPerHead",
        in_channels=[_base_.arch.embed_dims] * 4,
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2),
        channels=64,
        dropout_ratio=0.1,
        num_classes=len(_base_.scene_classes),
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, class_weight=_base_.scene_class_weights),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode="whole"),
)

train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations"),
    dict(type="RandomCrop", crop_size=(_base_.scene_crop, _base_.scene_crop)),
    dict(type="PackSegInputs"),
]
test_pipeline = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations"), dict(type="PackSegInputs")]

train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(pipeline=train_pipeline, indices=_base_.few_scenes, **_base_.train_scenes),
)
val_dataloader = dict(
    batch_size=20,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(pipeline=test_pipeline, **_base_.val_scenes),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
test_evaluator = val_evaluator

optim_wrapper = dict(
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    paramwise_cfg=dict(layer_decay_rate=0.75),
    optimizer=dict(type="AdamW", fused=True, lr=3e-3, weight_decay=0.05),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, begin=0, end=20, by_epoch=False),
    dict(type="PolyLR", power=1.0, eta_min=0.0, begin=20, end=_base_.upernet_iterations, by_epoch=False),
]
train_cfg = dict(type="IterBasedTrainLoop", max_iters=_base_.upernet_iterations, val_interval=250)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
