# A third of Fashion-MNIST's training images.
_base_ = "fashion_mnist.py"

unlabelled_scenes = "fashion_mnist_20000_scenes"
tables = ["fashion_mnist_20000", "micro"]

# Changes to a pre-training of another length than the usual, in epochs.
lengths = {n: {"train_cfg.max_epochs": n, "param_scheduler.1.end": n} for n in (2, 10, 11, 15, 20, 23)}
