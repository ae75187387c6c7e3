# A third of Fashion-MNIST's training images.
_base_ = "fashion_mnist.py"
