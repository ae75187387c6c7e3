# Tokens by k-means of the features of the dataset's `grid_encoder`, or of a patch's pixels if it has none.
_base_ = "_base_/tokenizer.py"

token_store = _base_.token_stores.grid

pixels = dict(type="torch.nn.PixelUnshuffle", downscale_factor=_base_.patch_size)
trained_by = _base_.grid_training

tokenizer = dict(
    type="mapet_mm.GridKMeans",
    encoder=_base_.grid_encoder or pixels,
    image_size=_base_.img_size,
    codebook=_base_.grid_codebook_file,
)
data_preprocessor = dict(type="SelfSupDataPreprocessor", mean=_base_.mean, std=_base_.std, to_rgb=True)

resize = dict(
    type="ResizeEdge", scale=_base_.img_size, edge="short", backend="pillow", interpolation="bicubic"
)
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
recipe = "mapet_vit-micro_kclip_1xb32-coslr" if _base_.tokens == "grid" else "token-mlp_grid_1xb64-coslr"
next_config = f"configs/micro/{recipe}.py"
