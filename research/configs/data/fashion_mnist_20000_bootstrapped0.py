# Tokens by k-means of the features of a MIM that was pre-trained on tokens of windows, for seed 0 of a table.
_base_ = "fashion_mnist_20000_bootstrap1.py"

data_set = "fashion_mnist_20000_bootstrapped0"
work_root = "work_dirs/fashion_mnist_20000_bootstrapped0"
tokenizer_seed = 10
checkpoint = f"{work_root}/previous/epoch_5.pth"
grid_encoder = dict(init_cfg=dict(checkpoint=checkpoint))
grid_training = dict(
    config="research/configs/mim_vit-micro_kclip_1xb32-amp-coslr.py",
    checkpoint=checkpoint,
    data="fashion_mnist_20000_windows0",
)
