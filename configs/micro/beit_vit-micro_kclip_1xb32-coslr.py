# MMPretrain's BEiT as a plain ViT: absolute positions, no relative position bias, biases for q, k and v.
_base_ = "_base_/pretrain.py"

# As large a share of the patches as on ImageNet (75 of 196, 38 %) is masked in blocks.
num_masked = round(75 / 196 * _base_.num_patches)
mask = dict(
    type="mapet_mm.BlockwiseMask",
    input_size=_base_.grid,
    num_masking_patches=num_masked,
    min_num_patches=3,
)
train_dataloader = dict(
    dataset=dict(pipeline=[*_base_.load, _base_.color_jitter, _base_.load_tokens, mask, _base_.pack])
)
val_dataloader = val_evaluator = val_cfg = None  # MMPretrain's BEiT has no validation
test_evaluator = []  # nor a test: the images are for feature extraction

model = dict(
    type="BEiT",
    backbone=dict(
        type="BEiTPretrainViT",
        arch=_base_.arch,
        img_size=_base_.img_size,
        patch_size=_base_.patch_size,
        layer_scale_init_value=0.1,
        use_abs_pos_emb=True,
        use_rel_pos_bias=False,
        use_shared_rel_pos_bias=False,
        layer_cfgs=dict(bias=True),
        init_cfg=[
            dict(type="TruncNormal", layer=["Linear", "Conv2d"], std=0.02),
            dict(type="Constant", layer="LayerNorm", val=1.0, bias=0.0),
        ],
    ),
    neck=None,
    head=dict(
        type="mapet_mm.BEiTTokenHead",
        embed_dims=_base_.arch.embed_dims,
        vocab_size=_base_.vocab_size,
        max_masked=num_masked,
    ),
    target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=_base_.vocab_size),
)
