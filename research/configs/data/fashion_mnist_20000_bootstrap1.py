# Bootstrapped tokens, generation 1: k-means of the features of a MaPeT that was pre-trained on those of
# generation 0.
_base_ = "fashion_mnist_20000_bootstrap0.py"

data_set = "fashion_mnist_20000_bootstrap1"
work_root = "work_dirs/fashion_mnist_20000_bootstrap1"
checkpoint = f"{work_root}/previous/epoch_5.pth"
grid_encoder = dict(
    type="mapet_mm.MaPeTViT",
    arch=dict(embed_dims=96, num_layers=4, num_heads=3, feedforward_channels=384),
    img_size=28,
    patch_size=4,
    out_type="raw",
    init_cfg=dict(type="Pretrained", checkpoint=checkpoint, prefix="backbone."),
)
grid_training = dict(
    config="configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py",
    checkpoint=checkpoint,
    data="fashion_mnist_20000_bootstrap0",
    tokenizer="configs/micro/grid.py",
)
