# DINO on scenes: 30 queries, two layers each way, maps of strides 4, 8 and 16. The checkpoint goes into
# `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = ["../../_base_/models/dino_vit-base-p16.py", "../_base_/scenes_coco.py"]

dims = dict(embed_dims=64, num_levels=3)
model = dict(
    num_queries=30,
    num_feature_levels=3,
    data_preprocessor=dict(mean=_base_.mean, std=_base_.std, pad_size_divisor=1),
    backbone=dict(_delete_=True, **_base_.backbone),
    neck=dict(in_channels=_base_.arch.embed_dims, out_channels=64, scale_factors=(1, 0.5), num_outs=3),
    encoder=dict(
        num_layers=2,
        layer_cfg=dict(self_attn_cfg=dims, ffn_cfg=dict(embed_dims=64, feedforward_channels=256)),
    ),
    decoder=dict(
        num_layers=2,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=64),
            cross_attn_cfg=dims,
            ffn_cfg=dict(embed_dims=64, feedforward_channels=256),
        ),
    ),
    positional_encoding=dict(num_feats=32),
    bbox_head=dict(embed_dims=64, num_classes=len(_base_.thing_classes)),
    dn_cfg=dict(group_cfg=dict(num_dn_queries=20)),
    test_cfg=dict(max_per_img=20),
)

val_evaluator = dict(metric="bbox")
test_evaluator = val_evaluator
