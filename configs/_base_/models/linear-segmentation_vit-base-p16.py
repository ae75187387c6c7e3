# Linear segmentation of a frozen ViT-B/16, as DINOv3 evaluates: the last layer's normalised patch tokens,
# dropout, BatchNorm and a 1 x 1 convolution. The pre-training checkpoint goes into
# `model.backbone.init_cfg.checkpoint` (--cfg-options).
model = dict(
    type="EncoderDecoder",
    # In the model, not beside it: MMSegmentation's inferencers look for it here.
    data_preprocessor=dict(
        type="mapet_mm.SegDataPreProcessor",  # MMSegmentation's, without waits for the GPU
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=(512, 512),
        # A smaller image, as of --tta, is padded as in training.
        test_cfg=dict(size=(512, 512)),
    ),
    backbone=dict(
        type="mapet_mm.MaPeTViT",
        arch="deit-base",
        img_size=512,
        patch_size=16,
        out_type="featmap",
        out_indices=[11],
        frozen_stages=12,
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
    neck=dict(type="mapet_mm.BatchNormNeck", channels=768, dropout=0.1, norm_cfg=dict(type="SyncBN")),
    # Without convolutions FCNHead is its classifier, which is drawn from a normal distribution of 0.01.
    decode_head=dict(
        type="FCNHead",
        num_convs=0,
        concat_input=False,
        in_channels=768,
        in_index=0,
        channels=768,
        dropout_ratio=0.0,
        num_classes=150,
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode="slide", crop_size=(512, 512), stride=(341, 341)),
)
