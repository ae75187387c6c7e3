# Segmenter's mask Transformer on the last layer, on few labelled scenes.
# The checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = "vit-micro_upernet_1xb8-poly.py"

model = dict(
    backbone=dict(out_indices=[3]),
    neck=None,
    decode_head=dict(
        _delete_=True,
        type="SegmenterMaskTransformerHead",
        in_channels=_base_.arch.embed_dims,
        channels=_base_.arch.embed_dims,
        embed_dims=_base_.arch.embed_dims,
        num_layers=2,
        num_heads=_base_.arch.num_heads,
        dropout_ratio=0.0,
        num_classes=len(_base_.scene_classes),
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, class_weight=_base_.scene_class_weights),
    ),
)
