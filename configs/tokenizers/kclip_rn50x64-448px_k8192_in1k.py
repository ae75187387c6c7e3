# k-CLIP as in the paper: CLIP RN50x64 grid features of ImageNet-1k, 8192 centroids.
_base_ = ["../_base_/tokenizers/kclip_rn50x64_k8192.py", "../_base_/datasets/imagenet_images.py"]

token_store = "data/imagenet/tokens/kclip_rn50x64_8192"
data_preprocessor = dict(
    type="SelfSupDataPreprocessor", mean=_base_.tokenizer_mean, std=_base_.tokenizer_std, to_rgb=True
)

pipeline = [_base_.load, *_base_.tokenizer_square, _base_.pack]
dataset = [
    dict(pipeline=pipeline, **_base_.train_images),
    dict(pipeline=pipeline, **_base_.val_images),
]

codebook = dict(
    dataset=dataset[0],
    positions_per_image=4,  # 2 % of the 196: 5.1 M rows
    k=8192,
    niter=20,
    nredo=5,
    max_points_per_centroid=512,
    seed=0,
)

# What to run after the extraction.
next_config = "configs/mapet/mapet_vit-base-p16_kclip_64xb32-amp-coslr-300e_in1k.py"
