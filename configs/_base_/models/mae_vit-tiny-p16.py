_base_ = "mae_vit-base-p16.py"

# As in the paper, decoding the whole grid costs about as much as encoding a quarter of it.
model = dict(
    backbone=dict(arch="deit-tiny"),
    neck=dict(embed_dim=192, decoder_embed_dim=192, decoder_depth=2, decoder_num_heads=6),
)
