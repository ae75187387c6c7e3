_base_ = "cae_vit-base-p16.py"

model = dict(backbone=dict(arch="deit-tiny"), neck=dict(encoder_dims=192, embed_dims=192, num_heads=3))
next_config = "configs/mapet/benchmarks/vit-tiny-p16_4xb256-amp-coslr-300e_in1k.py"
