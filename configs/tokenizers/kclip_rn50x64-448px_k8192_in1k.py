# k-CLIP as in the paper: CLIP RN50x64 grid features of ImageNet-1k, 8192 centroids.
default_scope = "mmpretrain"

data_root = "data/imagenet"
token_store = "data/imagenet/tokens/kclip_rn50x64_8192"

tokenizer = dict(
    type="mapet_mm.KCLIP",
    clip_model="RN50x64",
    pretrained="openai",
    codebook="work_dirs/tokenizers/kclip_rn50x64-448px_k8192_in1k.safetensors",
)

# CLIP's own mean and standard deviation, in 0..255.
data_preprocessor = dict(
    type="SelfSupDataPreprocessor",
    mean=[122.7709383, 116.7460125, 104.09373615],
    std=[68.5005327, 66.6321579, 70.32316305],
    to_rgb=True,
)

pipeline = [
    dict(type="LoadImageFromFile", imdecode_backend="pillow"),
    dict(type="ResizeEdge", scale=448, edge="short", backend="pillow", interpolation="bicubic"),
    dict(type="CenterCrop", crop_size=448),
    dict(type="PackInputs"),
]
train_dataset = dict(type="ImageNet", data_root=data_root, split="train", pipeline=pipeline)
val_dataset = dict(type="ImageNet", data_root=data_root, split="val", pipeline=pipeline)
dataset = [train_dataset, val_dataset]
dataloader = dict(batch_size=64, num_workers=8)

codebook = dict(
    dataset=train_dataset,
    positions_per_image=4,  # 2 % of the 196: 5.1 M rows
    k=8192,
    niter=20,
    nredo=5,
    max_points_per_centroid=512,
    seed=0,
)

# What to run after the extraction.
next_config = "configs/mapet/mapet_vit-base-p16_kclip_64xb32-amp-coslr-300e_in1k.py"
