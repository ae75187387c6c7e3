_base_ = "mapet_vit-base-p16_segmenter_8xb2-amp-160k_ade20k-512x512.py"

model = dict(
    backbone=dict(arch="deit-tiny"),
    decode_head=dict(in_channels=192, channels=192, embed_dims=192, num_heads=3),
)
