# k-CLIP for the embedded digits: a small CLIP ResNet with fixed random weights, so nothing is downloaded.
_base_ = "_base_/digits_images.py"

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

resize = dict(type="ResizeEdge", scale=192, edge="short", backend="pillow", interpolation="bicubic")
pipeline = [_base_.load, resize, _base_.pack]
dataset = [
    dict(pipeline=pipeline, **_base_.train_images),
    dict(pipeline=pipeline, **_base_.val_images),
]

codebook = dict(
    dataset=dataset[0],
    positions_per_image=16,
    k=128,
    niter=20,
    nredo=5,
    max_points_per_centroid=512,
    seed=0,
)

# What to run after the extraction.
next_config = "configs/digits/mapet_vit-micro-p4_kclip_1xb32-coslr-16e_digits.py"
