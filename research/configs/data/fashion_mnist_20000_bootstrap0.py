# Bootstrapped tokens, generation 0: k-means of pixels.
_base_ = "fashion_mnist_20000.py"

data_set = "fashion_mnist_20000_bootstrap0"
work_root = "work_dirs/fashion_mnist_20000_bootstrap0"
tokens = "grid"
