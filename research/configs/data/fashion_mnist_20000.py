# A third of Fashion-MNIST's training images, and half the lengths, for two CPU cores.
_base_ = "fashion_mnist.py"

data_set = "fashion_mnist_20000"
work_root = "work_dirs/fashion_mnist_20000"
train_images = dict(ann_file="meta/train_20000.txt")
pretrain_epochs = 5
scratch_epochs = 10
clip_epochs = 2
vqkd_epochs = dalle_epochs = 5
