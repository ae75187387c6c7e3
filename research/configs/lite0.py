# Tokens of photographs: k-means of the dataset's `grid_encoder`, a network that was trained on ImageNet's
# labels, on images so large that there is one position of its grid for each patch of the ViT.
_base_ = "../../configs/micro/grid.py"

image_size = 32 * _base_.grid
tokenizer = dict(image_size=image_size, precision="bfloat16")
# Its own, in 0..255.
data_preprocessor = dict(mean=[127.5] * 3, std=[127.5] * 3)

resize = dict(type="ResizeEdge", scale=image_size, edge="short", backend="pillow", interpolation="bicubic")
pipeline = [*_base_.token_load, resize, _base_.pack]
dataset = [
    dict(pipeline=pipeline, **_base_.train_images),
    dict(pipeline=pipeline, **_base_.val_images),
]
codebook = dict(dataset=dataset[0], num_images=5000, positions_per_image=32)
