# Scenes of Fashion-MNIST without labels, for pre-training; the labelled ones to evaluate on.
_base_ = "fashion_mnist_20000.py"

data_set = "fashion_mnist_20000_scenes"
work_root = "work_dirs/fashion_mnist_20000_scenes"
data_root = "data/fashion_mnist_scenes_unlabelled"

load = [dict(type="LoadImageFromFile"), dict(type="CenterCrop", crop_size=32)]
img_size = 32
unlabelled = dict(type="CustomDataset", data_root=data_root, with_label=False)
train_images = dict(_delete_=True, data_prefix="train", **unlabelled)
few_images = dict(_delete_=True, data_prefix="train", **unlabelled)
val_images = dict(_delete_=True, data_prefix="val", **unlabelled)

# Scenes have no captions to train a CLIP on.
clip_training = None
