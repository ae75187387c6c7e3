# A third of Fashion-MNIST's training images.
_base_ = "fashion_mnist.py"

tables = ["fashion_mnist_20000", "micro"]
