# UperNet on four layers of a ViT-B/16, as BEiT and BEiT v2 set it up: a decoder as wide as the ViT, whose
# features are not normalised. The pre-training checkpoint goes into `model.backbone.init_cfg.checkpoint`
# (--cfg-options).
norm_cfg = dict(type="SyncBN", requires_grad=True)
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
        drop_path_rate=0.15,
        out_type="featmap",
        out_indices=[3, 5, 7, 11],
        final_norm=False,
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
    neck=dict(type="Feature2Pyramid", embed_dim=768, rescales=[4, 2, 1, 0.5], norm_cfg=norm_cfg),
    decode_head=dict(
        type="UPerHead",
        in_channels=[768, 768, 768, 768],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=768,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
    ),
    auxiliary_head=dict(
        type="FCNHead",
        in_channels=768,
        in_index=2,
        channels=256,
        num_convs=1,
        concat_input=False,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=0.4),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode="slide", crop_size=(512, 512), stride=(341, 341)),
)
