_base_ = "mapet_vit-base-p16.py"

model = dict(backbone=dict(arch="deit-tiny", cutting_point=50), head=dict(embed_dims=192))
next_config = "configs/mapet/benchmarks/vit-tiny-p16_4xb256-amp-coslr-300e_in1k.py"
