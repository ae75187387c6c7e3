# Segmenter's mask Transformer on the last layer of a ViT-B/16, as MMSegmentation sets it up. The pre-training
# checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = "upernet_vit-base-p16.py"

model = dict(
    backbone=dict(drop_path_rate=0.1, out_indices=[11], final_norm=True),
    neck=None,
    decode_head=dict(
        _delete_=True,
        type="SegmenterMaskTransformerHead",
        in_channels=768,
        channels=768,
        embed_dims=768,
        num_layers=2,
        num_heads=12,
        dropout_ratio=0.0,
        num_classes=150,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
    ),
    auxiliary_head=None,
    test_cfg=dict(stride=(480, 480)),
)
