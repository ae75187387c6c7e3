# Tokens by k-means of the features of a MIM that was pre-trained on tokens of windows, for seed 2 of a table.
_base_ = "fashion_mnist_20000_windows2.py"

data_set = "fashion_mnist_20000_bootstrapped2"
work_root = "work_dirs/fashion_mnist_20000_bootstrapped2"
checkpoint = f"{work_root}/previous/epoch_5.pth"
grid_encoder = dict(
    _delete_=True,
    type="mapet_mm.MaPeTViT",
    arch=dict(embed_dims=96, num_layers=4, num_heads=3, feedforward_channels=384),
    img_size=28,
    patch_size=4,
    out_type="raw",
    init_cfg=dict(type="Pretrained", checkpoint=checkpoint, prefix="backbone."),
)
grid_training = dict(
    config="research/configs/mim_vit-micro_kclip_1xb32-amp-coslr.py",
    checkpoint=checkpoint,
    data="fashion_mnist_20000_windows2",
    tokenizer="configs/micro/grid.py",
)
