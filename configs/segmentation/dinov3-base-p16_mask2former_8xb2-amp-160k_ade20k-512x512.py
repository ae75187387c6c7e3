# Mask2Former on a ViT-B/16 of timm's DINOv3, continued by `mapet-mm pretrain`; it needs MMDetection. The
# checkpoint goes into `model.backbone.init_cfg.checkpoint`; all of it is trained. For another ViT of timm
# that was continued, set `model.backbone.model_name=RUN` and `model.backbone.init_cfg=None`, and its width
# in the neck.
_base_ = [
    "../_base_/models/mask2former_vit-base-p16.py",
    "../_base_/datasets/ade20k_512.py",
    "../_base_/schedules/segmentation_adamw_160k.py",
    "../_base_/default_runtime_seg.py",
]

model = dict(
    backbone=dict(
        _delete_=True,
        type="mapet_mm.TIMMViT",
        model_name="vit_base_patch16_dinov3",
        drop_path_rate=0.15,
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
)

# MMSegmentation's rate and clipping for this decoder; queries are not decayed.
spared = dict(decay_mult=0.0)
optim_wrapper = dict(
    clip_grad=dict(max_norm=0.01, norm_type=2),
    paramwise_cfg=dict(custom_keys=dict(query_embed=spared, query_feat=spared, level_embed=spared)),
    optimizer=dict(lr=1e-4),
)
