# The same tokens, for seed 2 of a table: the codebook has a seed of its own, and not the 0 of the runs that
# chose rates and weights.
_base_ = "fashion_mnist_20000_windows.py"

data_set = "fashion_mnist_20000_windows2"
work_root = "work_dirs/fashion_mnist_20000_windows2"
tokenizer_seed = 12
