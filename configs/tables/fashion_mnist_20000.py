# A third of Fashion-MNIST's training images.
_base_ = "fashion_mnist.py"

unlabelled_scenes = "fashion_mnist_20000_scenes"
tables = ["fashion_mnist_20000", "micro"]
