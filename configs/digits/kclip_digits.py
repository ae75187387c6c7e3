# k-CLIP for the embedded digits: a small CLIP ResNet with fixed random weights, so nothing is downloaded.
default_scope = "mmpretrain"

data_root = "data/digits"
token_store = "work_dirs/digits/tokens"

tokenizer = dict(
    type="mapet_mm.KCLIP",
    clip_model=dict(layers=[1, 1, 1, 1], width=8, image_size=192),
    pretrained=dict(type="random", seed=0),
    codebook="work_dirs/digits/codebook.safetensors",
)

# CLIP's own mean and standard deviation, in 0..255.
data_preprocessor = dict(
    type="SelfSupDataPreprocessor",
    mean=[122.7709383, 116.7460125, 104.09373615],
    std=[68.5005327, 66.6321579, 70.32316305],
    to_rgb=True,
)

pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="ResizeEdge", scale=192, edge="short", backend="pillow", interpolation="bicubic"),
    dict(type="CenterCrop", crop_size=192),
    dict(type="PackInputs"),
]
train_dataset = dict(
    type="CustomDataset",
    data_root=data_root,
    data_prefix="train",
    ann_file="meta/train.txt",
    pipeline=pipeline,
)
val_dataset = dict(
    type="CustomDataset",
    data_root=data_root,
    data_prefix="val",
    ann_file="meta/val.txt",
    pipeline=pipeline,
)
dataset = [train_dataset, val_dataset]
dataloader = dict(batch_size=64, num_workers=2)

codebook = dict(
    dataset=train_dataset,
    positions_per_image=16,
    k=128,
    niter=20,
    nredo=5,
    max_points_per_centroid=512,
    seed=0,
)

# What to run after the extraction.
next_config = "configs/digits/mapet_vit-micro-p4_kclip_1xb32-coslr-16e_digits.py"
