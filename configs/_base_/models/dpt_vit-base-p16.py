# DPT on four layers of a ViT-B/16, class tokens included, as MMSegmentation sets it up; images are evaluated
# whole. The pre-training checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = "upernet_vit-base-p16.py"

model = dict(
    backbone=dict(out_type="featmap_and_cls_token", out_indices=[2, 5, 8, 11]),
    neck=None,
    decode_head=dict(
        _delete_=True,
        type="DPTHead",
        in_channels=[768, 768, 768, 768],
        in_index=[0, 1, 2, 3],
        input_transform="multiple_select",
        embed_dims=768,
        post_process_channels=[96, 192, 384, 768],
        readout_type="project",
        channels=256,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=_base_.norm_cfg,
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
    ),
    auxiliary_head=None,
    test_cfg=dict(_delete_=True, mode="whole"),
)
