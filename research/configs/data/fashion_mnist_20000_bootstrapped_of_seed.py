# Tokens by k-means of the features of a MIM that was pre-trained on tokens of windows, for one seed of a
# table.
_base_ = "fashion_mnist_20000_bootstrap1.py"

seed = int("{{$MAPET_MM_SEED:0}}")
data_set = f"fashion_mnist_20000_bootstrapped{seed}"
work_root = f"work_dirs/fashion_mnist_20000_bootstrapped{seed}"
tokenizer_seed = 10 + seed
checkpoint = f"{work_root}/previous/epoch_5.pth"
grid_encoder = dict(init_cfg=dict(checkpoint=checkpoint))
grid_training = dict(
    config="research/configs/mim_vit-micro_kclip_1xb32-amp-coslr.py",
    checkpoint=checkpoint,
    data=f"fashion_mnist_20000_windows{seed}",
)
