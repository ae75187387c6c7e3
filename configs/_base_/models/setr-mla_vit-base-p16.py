# SETR's multi-level aggregation of four layers of a ViT-B/16, each with an auxiliary loss, as MMSegmentation
# sets it up. The neck normalises the features. The pre-training checkpoint goes into
# `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = "upernet_vit-base-p16.py"

head = dict(dropout_ratio=0.0, num_classes=150, norm_cfg=_base_.norm_cfg, align_corners=False)
auxiliary_head = dict(
    type="FCNHead",
    in_channels=256,
    channels=256,
    num_convs=0,
    kernel_size=1,
    concat_input=False,
    loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=0.4),
    **head,
)
model = dict(
    backbone=dict(out_indices=[2, 5, 8, 11]),
    neck=dict(
        _delete_=True,
        type="MLANeck",
        in_channels=[768, 768, 768, 768],
        out_channels=256,
        norm_cfg=_base_.norm_cfg,
        act_cfg=dict(type="ReLU"),
    ),
    decode_head=dict(
        _delete_=True,
        type="SETRMLAHead",
        in_channels=[256, 256, 256, 256],
        in_index=[0, 1, 2, 3],
        channels=512,
        mla_channels=128,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
        **head,
    ),
    auxiliary_head=[dict(in_index=level, **auxiliary_head) for level in range(4)],
)
