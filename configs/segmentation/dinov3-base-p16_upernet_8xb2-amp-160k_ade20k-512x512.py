# UperNet on a ViT-B/16 of timm's DINOv3, continued by `mapet-mm pretrain`. Its checkpoint goes into
# `model.backbone.init_cfg.checkpoint`; all of it is trained. For another ViT of timm that was continued, set
# `model.backbone.model_name=RUN` and `model.backbone.init_cfg=None`, and its width in neck and heads.
_base_ = "mapet_vit-base-p16_upernet_8xb2-amp-160k_ade20k-512x512.py"

model = dict(
    backbone=dict(
        _delete_=True,
        type="mapet_mm.TIMMViT",
        model_name="vit_base_patch16_dinov3",
        drop_path_rate=0.15,
        out_indices=[3, 5, 7, 11],
        final_norm=False,
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
)
