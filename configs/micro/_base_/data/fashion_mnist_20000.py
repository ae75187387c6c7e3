# A third of Fashion-MNIST's training images, for two CPU cores.
_base_ = "fashion_mnist.py"

data_set = "fashion_mnist_20000"
work_root = "work_dirs/fashion_mnist_20000"
train_images = dict(ann_file="meta/train_20000.txt")
clip_epochs = 2
vqkd_epochs = dalle_epochs = 5
