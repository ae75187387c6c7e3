_base_ = "mae_vit-base-p16.py"

# As in the paper, decoding the whole grid costs about as much as encoding a quarter of it.
model = dict(
    backbone=dict(arch="deit-small"),
    neck=dict(embed_dim=384, decoder_embed_dim=256, decoder_depth=4, decoder_num_heads=8),
)
