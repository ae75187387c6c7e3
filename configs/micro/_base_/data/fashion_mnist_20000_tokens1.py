# The same images; CLIP and codebook are drawn with seed 1.
_base_ = "fashion_mnist_20000.py"

data_set = "fashion_mnist_20000_tokens1"
work_root = "work_dirs/fashion_mnist_20000_tokens1"
tokenizer_seed = 1
