# UperNet on 50 labelled scenes (background and ten digits): crops of 48 px, 12 x 12 patches; evaluated whole.
# The checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = ["_base_/vit-micro-p4.py", "../_base_/default_runtime_seg.py"]

norm_cfg = dict(type="BN", requires_grad=True)
model = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(
        type="SegDataPreProcessor",
        mean=[127.5, 127.5, 127.5],
        std=[63.75, 63.75, 63.75],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=(48, 48),
    ),
    backbone=dict(
        type="mapet_mm.MaPeTViT",
        arch=_base_.arch,
        img_size=48,
        patch_size=4,
        out_type="featmap",
        out_indices=[0, 1, 2, 3],
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
    # The finest level has half the resolution of the image: the patches are small.
    neck=dict(type="Feature2Pyramid", embed_dim=96, rescales=[2, 1, 0.5, 0.25], norm_cfg=norm_cfg),
    decode_head=dict(
        type="UPerHead",
        in_channels=[96, 96, 96, 96],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2),
        channels=64,
        dropout_ratio=0.1,
        num_classes=11,
        norm_cfg=norm_cfg,
        align_corners=False,
        # 88 % of the pixels are background.
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, class_weight=[0.2] + [1.0] * 10),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode="whole"),
)

classes = ("background", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
dataset = dict(
    type="BaseSegDataset",
    data_root="data/digits_scenes",
    img_suffix=".png",
    seg_map_suffix=".png",
    metainfo=dict(classes=classes),
)
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations"),
    dict(type="RandomCrop", crop_size=(48, 48)),
    dict(type="PackSegInputs"),
]
test_pipeline = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations"), dict(type="PackSegInputs")]

train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(
        data_prefix=dict(img_path="images/training", seg_map_path="annotations/training"),
        pipeline=train_pipeline,
        indices=50,
        **dataset,
    ),
)
val_dataloader = dict(
    batch_size=20,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        data_prefix=dict(img_path="images/validation", seg_map_path="annotations/validation"),
        pipeline=test_pipeline,
        **dataset,
    ),
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
    dict(type="PolyLR", power=1.0, eta_min=0.0, begin=20, end=500, by_epoch=False),
]
train_cfg = dict(type="IterBasedTrainLoop", max_iters=500, val_interval=250)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
