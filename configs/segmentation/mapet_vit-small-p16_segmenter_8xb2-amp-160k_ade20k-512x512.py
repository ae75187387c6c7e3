_base_ = "mapet_vit-base-p16_segmenter_8xb2-amp-160k_ade20k-512x512.py"

model = dict(
    backbone=dict(arch="deit-small"),
    decode_head=dict(in_channels=384, channels=384, embed_dims=384, num_heads=6),
)
