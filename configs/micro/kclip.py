# k-CLIP with the dataset's CLIP ResNet, on images so large that there is one token per patch of the ViT.
_base_ = "_base_/tokenizer.py"

token_store = _base_.token_stores.kclip
image_size = _base_.clip_stride * _base_.grid
trained = dict(config=_base_.clip_training, checkpoint=_base_.clip_checkpoint)
trained_by = trained if _base_.clip_training else None

tokenizer = dict(
    type="mapet_mm.KCLIP",
    clip_model=dict(image_size=image_size, **_base_.clip_resnet),
    pretrained=_base_.clip_checkpoint if _base_.clip_training else _base_.clip_weights,
    codebook=_base_.codebook_file,
    stride=_base_.clip_stride,
)
# CLIP's own mean and standard deviation, in 0..255.
data_preprocessor = dict(
    type="SelfSupDataPreprocessor",
    mean=[122.7709383, 116.7460125, 104.09373615],
    std=[68.5005327, 66.6321579, 70.32316305],
    to_rgb=True,
)

resize = dict(type="ResizeEdge", scale=image_size, edge="short", backend="pillow", interpolation="bicubic")
pipeline = [*_base_.load, resize, _base_.pack]
dataset = [
    dict(pipeline=pipeline, **_base_.train_images),
    dict(pipeline=pipeline, **_base_.val_images),
]

codebook = dict(
    dataset=dataset[0],
    positions_per_image=16,
    k=_base_.vocab_size,
    niter=20,
    nredo=5,
    max_points_per_centroid=512,
    seed=_base_.get("tokenizer_seed", 0),
)

# What to run after the extraction.
next_config = "configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py"
