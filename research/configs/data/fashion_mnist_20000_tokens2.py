# The same images, for seed 2 of a table: CLIP and codebook have a seed of their own, and not the 0 of the
# runs that chose the learning rates.
_base_ = "fashion_mnist_20000.py"

data_set = "fashion_mnist_20000_tokens2"
work_root = "work_dirs/fashion_mnist_20000_tokens2"
tokenizer_seed = 12
