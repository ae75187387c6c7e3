# Fashion-MNIST, as research/converters/fashion_mnist.py writes it: 60,000 photographs of clothes and shoes.
_base_ = "../../../configs/micro/_base_/data_defaults.py"

data_set = "fashion_mnist"
work_root = "work_dirs/fashion_mnist"  # codebook, token stores and trainings
data_root = "data/fashion_mnist"  # image names in token stores are relative to it

img_size = 28
num_classes = 10
class_names = (
    "t-shirt",
    "pair of trousers",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
train_images = dict(type="CustomDataset", data_root=data_root, data_prefix="train", ann_file="meta/train.txt")
few_labels = "600 labels"
few_images = dict(
    type="CustomDataset", data_root=data_root, data_prefix="train", ann_file="meta/train_600.txt"
)
val_images = dict(type="CustomDataset", data_root=data_root, data_prefix="val", ann_file="meta/val.txt")

# Lengths, in epochs of the images that are trained on.
warmup_epochs = 1
pretrain_epochs = 10
probe_epochs = 5
few_probe_epochs = 60
finetune_epochs = 5
few_finetune_epochs = 60
scratch_epochs = 15
token_epochs = 5
upernet_iterations = 1000

# k-CLIP's tower is trained here, on captions made of the class names: one token per 16 of its pixels.
tokenizer_note = (
    "All tokenizers were trained on the training images: k-CLIP's tower on captions that name their classes, "
    "VQ-KD on that tower's features, DALL-E's encoder on the pixels."
)
vocab_size = 256
clip_epochs = 1
clip_stride = 16
clip_training = "research/configs/clip_1xb128-coslr.py"
vqkd_training = "research/configs/vqkd-training_1xb64-coslr.py"
dalle_training = "research/configs/dalle-training_1xb64-coslr.py"
vqkd_epochs = dalle_epochs = 3

# Scenes with pixel labels: background and ten kinds of clothes and shoes.
few_scenes, all_scenes = 200, 2000
scene_crop = 48
scene_classes = ("background", *class_names)
scene_class_weights = [0.2] + [1.0] * 10
scenes = dict(
    type="BaseSegDataset",
    data_root="data/fashion_mnist_scenes",
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
