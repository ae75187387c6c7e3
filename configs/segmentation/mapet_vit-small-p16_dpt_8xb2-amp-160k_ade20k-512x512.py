_base_ = "mapet_vit-base-p16_dpt_8xb2-amp-160k_ade20k-512x512.py"

model = dict(
    backbone=dict(arch="deit-small"),
    decode_head=dict(
        in_channels=[384, 384, 384, 384],
        embed_dims=384,
        post_process_channels=[48, 96, 192, 384],
    ),
)
