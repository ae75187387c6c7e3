# Mask2Former on a plain ViT-B/16, as MMSegmentation sets it up for ADE20K; its four maps are made of the last
# layer's. It needs MMDetection and MMCV's compiled operators. The pre-training checkpoint goes into
# `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = "upernet_vit-base-p16.py"

num_classes = 150
embed_dims = 256
ffn = dict(embed_dims=embed_dims, num_fcs=2, ffn_drop=0.0, act_cfg=dict(type="ReLU", inplace=True))
attention = dict(embed_dims=embed_dims, num_heads=8, attn_drop=0.0, proj_drop=0.0, batch_first=True)
positions = dict(num_feats=embed_dims // 2, normalize=True)
model = dict(
    data_preprocessor=dict(test_cfg=dict(_delete_=True, size_divisor=32)),
    backbone=dict(out_indices=[11], final_norm=True),
    neck=dict(_delete_=True, type="mapet_mm.SimpleFeaturePyramid", in_channels=768, out_channels=embed_dims),
    decode_head=dict(
        _delete_=True,
        type="Mask2FormerHead",
        in_channels=[embed_dims] * 4,
        strides=[4, 8, 16, 32],
        feat_channels=embed_dims,
        out_channels=embed_dims,
        num_classes=num_classes,
        num_queries=100,
        num_transformer_feat_level=3,
        align_corners=False,
        enforce_decoder_input_project=False,
        positional_encoding=positions,
        pixel_decoder=dict(
            type="mmdet.MSDeformAttnPixelDecoder",
            num_outs=3,
            norm_cfg=dict(type="GN", num_groups=32),
            act_cfg=dict(type="ReLU"),
            positional_encoding=positions,
            encoder=dict(
                num_layers=6,
                layer_cfg=dict(
                    self_attn_cfg=dict(
                        embed_dims=embed_dims,
                        num_heads=8,
                        num_levels=3,
                        num_points=4,
                        dropout=0.0,
                        batch_first=True,
                    ),
                    ffn_cfg=dict(ffn, feedforward_channels=1024),
                ),
            ),
        ),
        transformer_decoder=dict(
            return_intermediate=True,
            num_layers=9,
            layer_cfg=dict(
                self_attn_cfg=attention,
                cross_attn_cfg=attention,
                ffn_cfg=dict(ffn, feedforward_channels=2048, add_identity=True),
            ),
            init_cfg=None,
        ),
        loss_cls=dict(
            type="mmdet.CrossEntropyLoss",
            use_sigmoid=False,
            loss_weight=2.0,
            reduction="mean",
            class_weight=[1.0] * num_classes + [0.1],
        ),
        loss_mask=dict(type="mmdet.CrossEntropyLoss", use_sigmoid=True, reduction="mean", loss_weight=5.0),
        loss_dice=dict(
            type="mmdet.DiceLoss",
            use_sigmoid=True,
            activate=True,
            reduction="mean",
            naive_dice=True,
            eps=1.0,
            loss_weight=5.0,
        ),
        train_cfg=dict(
            num_points=12544,
            oversample_ratio=3.0,
            importance_sample_ratio=0.75,
            assigner=dict(
                type="mmdet.HungarianAssigner",
                match_costs=[
                    dict(type="mmdet.ClassificationCost", weight=2.0),
                    dict(type="mmdet.CrossEntropyLossCost", weight=5.0, use_sigmoid=True),
                    dict(type="mmdet.DiceCost", weight=5.0, pred_act=True, eps=1.0),
                ],
            ),
            sampler=dict(type="mmdet.MaskPseudoSampler"),
        ),
    ),
    auxiliary_head=None,
    test_cfg=dict(_delete_=True, mode="whole"),  # the head's masks have the size of the whole image
)
