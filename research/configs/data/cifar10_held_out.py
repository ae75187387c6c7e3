# 35,000 of the images to learn from, judged on 5,000 others that no table measures: for choices.
_base_ = "cifar10.py"

data_set = "cifar10_held_out"
work_root = "work_dirs/cifar10_held_out"
train_images = dict(ann_file="meta/train_35000.txt")
val_images = dict(ann_file="meta/held_out.txt")
