# CIFAR-10's training photographs, as research/converters/cifar10.py writes them: 40,000 to train on, 10,000
# to measure.
_base_ = "../../../configs/micro/_base_/data_defaults.py"

data_set = "cifar10"
work_root = "work_dirs/cifar10"  # codebook, token stores and trainings
data_root = "data/cifar10"  # image names in token stores are relative to it

img_size = 32
num_classes = 10
train_images = dict(type="CustomDataset", data_root=data_root, data_prefix="train", ann_file="meta/train.txt")
few_labels = "400 labels"
few_images = dict(
    type="CustomDataset", data_root=data_root, data_prefix="train", ann_file="meta/train_400.txt"
)
val_images = dict(type="CustomDataset", data_root=data_root, data_prefix="train", ann_file="meta/val.txt")

# Lengths, in epochs of the images that are trained on.
warmup_epochs = 1
pretrain_epochs = 5
probe_epochs = 5
few_probe_epochs = 60
finetune_epochs = 5
few_finetune_epochs = 60
scratch_epochs = 15
token_epochs = 5

tokenizer_note = (
    "Tokens are clusters of the features of EfficientNet-Lite0, which was trained on ImageNet's labels."
)
tokens = "grid"
vocab_size = 256
token_load = [dict(type="LoadImageFromFile")]  # what the tokenizer sees
grid_encoder = dict(
    type="TIMMBackbone",
    model_name="tf_efficientnet_lite0",
    init_cfg=dict(type="Pretrained", checkpoint="data/efficientnet_lite0.pth"),
)

# It has no pixel labels.
scenes = dict(type="BaseSegDataset", data_root=data_root)
train_scenes = val_scenes = scenes
