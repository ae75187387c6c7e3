# The embedded digits, as tools/dataset_converters/digits.py writes them.
_base_ = "../data_defaults.py"

data_set = "digits"
work_root = "work_dirs/digits"  # codebook, token stores and trainings
data_root = "data/digits"  # image names in token stores are relative to it

img_size = 24
num_classes = 10
train_images = dict(type="CustomDataset", data_root=data_root, data_prefix="train", ann_file="meta/train.txt")
few_labels = "100 labels"
few_images = dict(
    type="CustomDataset", data_root=data_root, data_prefix="train", ann_file="meta/train_100.txt"
)
val_images = dict(type="CustomDataset", data_root=data_root, data_prefix="val", ann_file="meta/val.txt")

# Images with pixel labels, here the single digits themselves: background and ten digits.
few_scenes, all_scenes = 100, 1437
scene_crop = 24
scene_classes = ("background", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
scene_class_weights = [0.2] + [1.0] * 10
scenes = dict(
    type="BaseSegDataset",
    data_root="data/digits_pixels",
    img_suffix=".png",
    seg_map_suffix=".png",
    metainfo=dict(classes=scene_classes),
)
train_scenes = dict(
    data_prefix=dict(img_path="images/training", seg_map_path="annotations/training"), **scenes
)
val_scenes = dict(
    data_prefix=dict(img_path="images/validation", seg_map_path="annotations/validation"), **scenes
)
