# DPT on all four layers, class tokens included, on few labelled scenes.
# The checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = "vit-micro_upernet_1xb8-poly.py"

model = dict(
    backbone=dict(out_type="featmap_and_cls_token"),
    neck=None,
    decode_head=dict(
        _delete_=True,
        type="DPTHead",
        in_channels=[_base_.arch.embed_dims] * 4,
        in_index=[0, 1, 2, 3],
        input_transform="multiple_select",
        embed_dims=_base_.arch.embed_dims,
        post_process_channels=[12, 24, 48, 96],
        readout_type="project",
        channels=64,
        dropout_ratio=0.1,
        num_classes=len(_base_.scene_classes),
        norm_cfg=_base_.norm_cfg,
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, class_weight=_base_.scene_class_weights),
    ),
)
