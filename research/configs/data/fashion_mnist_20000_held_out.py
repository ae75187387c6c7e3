# The same images to learn from, judged on 5,000 other training images that no table measures: for choices.
_base_ = "fashion_mnist_20000.py"

data_set = "fashion_mnist_20000_held_out"
work_root = "work_dirs/fashion_mnist_20000_held_out"
val_images = dict(data_prefix="train", ann_file="meta/held_out.txt")
few_scenes = all_scenes = 0  # scenes are other tables'
