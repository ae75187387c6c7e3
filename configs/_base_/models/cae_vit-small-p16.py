_base_ = "cae_vit-base-p16.py"

model = dict(backbone=dict(arch="deit-small"), neck=dict(encoder_dims=384, embed_dims=384, num_heads=6))
next_config = "configs/mapet/benchmarks/vit-small-p16_4xb256-amp-coslr-200e_in1k.py"
