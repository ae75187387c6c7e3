# ViT-B/16 with two streams (paper, hyper-parameters for pre-training); LayerScale 0.1 is MaPeTViT's default.
model = dict(
    type="mapet_mm.MaPeT",
    backbone=dict(
        type="mapet_mm.MaPeTPretrainViT",
        arch="deit-base",
        img_size=224,
        patch_size=16,
        objective="mapet",
        cutting_point=60,
        drop_path_rate=0.1,
        recompute=False,  # no effect; without it, trainings under way would be other ones
    ),
    head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=768, vocab_size=8192),
    target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=8192),
)

# What to run after the training.
next_config = "configs/mapet/benchmarks/vit-base-p16_16xb64-amp-coslr-100e_in1k.py"
