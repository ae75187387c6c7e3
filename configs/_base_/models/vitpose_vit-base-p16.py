# ViTPose (Xu et al., 2022): two deconvolutions on a plain ViT-B and a heat map for each key point. Patches
# as in pre-training, without ViTPose's padding of 2 pixels. The checkpoint goes into
# `model.backbone.init_cfg.checkpoint` (--cfg-options).
model = dict(
    type="TopdownPoseEstimator",
    data_preprocessor=dict(
        type="PoseDataPreprocessor",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
    ),
    backbone=dict(
        type="mapet_mm.MaPeTViT",
        arch="deit-base",
        img_size=(256, 192),
        patch_size=16,
        drop_path_rate=0.3,
        out_type="featmap",
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
    head=dict(
        type="HeatmapHead",
        in_channels=768,
        out_channels=17,
        deconv_out_channels=(256, 256),
        deconv_kernel_sizes=(4, 4),
        loss=dict(type="KeypointMSELoss", use_target_weight=True),
        decoder=dict(type="UDPHeatmap", input_size=(192, 256), heatmap_size=(48, 64), sigma=2),
    ),
    test_cfg=dict(flip_test=True, flip_mode="heatmap", shift_heatmap=False),
)
