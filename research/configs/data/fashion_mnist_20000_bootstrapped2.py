# Tokens by k-means of the features of a MIM that was pre-trained on tokens of windows, for seed 2 of a table.
_base_ = "fashion_mnist_20000_bootstrapped0.py"

data_set = "fashion_mnist_20000_bootstrapped2"
work_root = "work_dirs/fashion_mnist_20000_bootstrapped2"
tokenizer_seed = 12
checkpoint = f"{work_root}/previous/epoch_5.pth"
grid_encoder = dict(init_cfg=dict(checkpoint=checkpoint))
grid_training = dict(checkpoint=checkpoint, data="fashion_mnist_20000_windows2")
