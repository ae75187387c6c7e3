# Bootstrapped tokens, round 1: k-means of the features of what was pre-trained on those of round 0.
_base_ = "fashion_mnist_20000_round0.py"

data_set = "fashion_mnist_20000_round1"
work_root = "work_dirs/fashion_mnist_20000_round1"
previous_round = "fashion_mnist_20000_round0"
