# SETR's progressive upsampling of a ViT-B/16's last layer, and auxiliary losses on three layers before, as
# MMSegmentation sets it up for a ViT-L (layers 9, 14, 19 of 24). The heads normalise their features. The
# pre-training checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = "upernet_vit-base-p16.py"

head = dict(
    type="SETRUPHead",
    in_channels=768,
    channels=256,
    kernel_size=3,
    dropout_ratio=0.0,
    num_classes=150,
    norm_cfg=_base_.norm_cfg,
    align_corners=False,
)
auxiliary_head = dict(
    num_convs=2,
    up_scale=4,
    loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=0.4),
    **head,
)
model = dict(
    backbone=dict(out_indices=[4, 6, 9, 11]),
    neck=None,
    decode_head=dict(
        _delete_=True,
        in_index=3,
        num_convs=4,
        up_scale=2,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
        **head,
    ),
    auxiliary_head=[dict(in_index=layer, **auxiliary_head) for layer in range(3)],
)
