# Bootstrapped tokens, generation 2: k-means of the features of a MaPeT that was pre-trained on those of
# generation 1.
_base_ = "fashion_mnist_20000_bootstrap1.py"

data_set = "fashion_mnist_20000_bootstrap2"
work_root = "work_dirs/fashion_mnist_20000_bootstrap2"
checkpoint = f"{work_root}/previous/epoch_5.pth"
grid_encoder = dict(init_cfg=dict(checkpoint=checkpoint))
grid_training = dict(checkpoint=checkpoint, data="fashion_mnist_20000_bootstrap1")
