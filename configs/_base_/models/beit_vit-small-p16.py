_base_ = "beit_vit-base-p16.py"

model = dict(backbone=dict(arch="deit-small"), head=dict(embed_dims=384))
next_config = "configs/mapet/benchmarks/vit-small-p16_4xb256-amp-coslr-200e_in1k.py"
