# Tokens by k-means of the features of a MIM that was pre-trained on tokens of windows.
_base_ = "cifar10_held_out.py"

data_set = "cifar10_bootstrapped"
work_root = "work_dirs/cifar10_bootstrapped"
checkpoint = f"{work_root}/previous/epoch_5.pth"
grid_encoder = dict(
    _delete_=True,
    type="mapet_mm.MaPeTViT",
    arch=dict(embed_dims=96, num_layers=4, num_heads=3, feedforward_channels=384),
    img_size=32,
    patch_size=4,
    out_type="raw",
    init_cfg=dict(type="Pretrained", checkpoint=checkpoint, prefix="backbone."),
)
grid_training = dict(
    config="research/configs/mim_vit-micro_kclip_1xb32-amp-coslr.py",
    checkpoint=checkpoint,
    data="cifar10_windows",
    tokenizer="configs/micro/grid.py",
)
