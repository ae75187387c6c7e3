# timm's ViT with four register tokens, which are context as the class token is.
_base_ = "mapet_vit-micro_kclip_1xb32-coslr.py"

registers = 4
model = dict(
    backbone=dict(
        _delete_=True,
        type="mapet_mm.MaPeTPretrainTIMM",
        model_name="vit_tiny_patch16_224",
        img_size=_base_.img_size,
        patch_size=_base_.patch_size,
        embed_dim=_base_.arch.embed_dims,
        depth=_base_.arch.num_layers,
        num_heads=_base_.arch.num_heads,
        mlp_ratio=_base_.arch.feedforward_channels / _base_.arch.embed_dims,
        init_values=0.1,
        reg_tokens=registers,
        objective="mapet",
        cutting_point=_base_.model.backbone.cutting_point + registers,
    )
)
next_config = None  # no recipe fine-tunes it
