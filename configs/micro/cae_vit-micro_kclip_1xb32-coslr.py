# MMPretrain's CAE on a plain ViT; regressor and decoder are as wide as the encoder and have half its depth.
_base_ = "_base_/pretrain.py"

# Half of the patches are masked in blocks.
num_masked = _base_.num_patches // 2
mask = dict(
    type="mapet_mm.BlockwiseMask",
    input_size=_base_.grid,
    num_masking_patches=num_masked,
    min_num_patches=3,
)
train_dataloader = dict(
    dataset=dict(pipeline=[*_base_.load, _base_.color_jitter, _base_.load_tokens, mask, _base_.pack])
)
val_dataloader = val_evaluator = val_cfg = None  # MMPretrain's CAE has no validation
test_evaluator = []  # nor a test: the images are for feature extraction

model = dict(
    type="mapet_mm.ProjectedCAE",
    backbone=dict(
        type="CAEPretrainViT",
        arch=_base_.arch,
        img_size=_base_.img_size,
        patch_size=_base_.patch_size,
        layer_scale_init_value=0.1,
        bias=True,
    ),
    neck=dict(
        type="mapet_mm.ProjectedCAENeck",
        encoder_dims=_base_.arch.embed_dims,
        embed_dims=_base_.arch.embed_dims,
        num_heads=_base_.arch.num_heads,
        regressor_depth=2,
        decoder_depth=2,
        layer_scale_init_value=0.1,
        mask_tokens_num=num_masked,
        num_classes=_base_.vocab_size,
    ),
    head=dict(type="mapet_mm.CAETokenHead", loss=dict(type="CAELoss", lambd=2)),
    target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=_base_.vocab_size),
    base_momentum=0.0,
)
