# The same images for seed 2 of a table; CLIP and codebook are drawn with a seed of their own. None of the
# three is the 0 with which the learning rates were chosen.
_base_ = "fashion_mnist_20000.py"

data_set = "fashion_mnist_20000_tokens2"
work_root = "work_dirs/fashion_mnist_20000_tokens2"
tokenizer_seed = 12
