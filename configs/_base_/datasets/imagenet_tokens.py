# ImageNet-1k with stored token grids: the largest centred square, which is what the grids cover.
# A file per tokenizer completes the pipelines with its token stores (`imagenet_tokens_kclip.py`).
data_preprocessor = dict(
    type="mapet_mm.TokenGridDataPreprocessor",
    mean=[123.675, 116.28, 103.53],
    std=[58.395, 57.12, 57.375],
    to_rgb=True,
)

load_square = [
    dict(type="LoadImageFromFile"),
    # The largest centred square, then resized: without an attempt at a random crop there is its fallback, the
    # centre rounded down, which is the authors' crop.
    dict(
        type="RandomResizedCrop",
        scale=224,
        crop_ratio_range=(1.0, 1.0),
        aspect_ratio_range=(1.0, 1.0),
        max_attempts=0,
        backend="pillow",
        interpolation="bicubic",
    ),
]
color_jitter = dict(type="mapet_mm.ColorJitter", brightness=0.4, contrast=0.4, saturation=0.4)
pack = dict(type="PackInputs", algorithm_keys=["token_grid"])

train_dataloader = dict(
    batch_size=32,
    num_workers=14,  # as tools/slurm_train.sh asks for cores
    persistent_workers=True,
    pin_memory=True,
    drop_last=True,  # every step has as many images: torch.compile sees one shape
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="ImageNet", data_root="data/imagenet", split="train"),
)

val_dataloader = dict(
    batch_size=64,
    num_workers=4,
    persistent_workers=True,
    pin_memory=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="ImageNet", data_root="data/imagenet", split="val"),
)
val_evaluator = dict(type="mapet_mm.TokenAccuracy")
val_cfg = dict()

test_dataloader = val_dataloader
test_evaluator = val_evaluator
test_cfg = dict()

# k-NN every tenth of the run, on 20,000 images of each set; `mapet-mm evaluate` takes all of them. Without
# ImageNet's images, a line in the log says at the start that there is no k-NN.
knn_loader = dict(batch_size=256, num_workers=8)
knn_dataset = dict(
    type="ImageNet", data_root="data/imagenet", pipeline=[*load_square, dict(type="PackInputs")]
)
knn_probe = dict(
    type="mapet_mm.KNNProbeHook",
    train_dataloader=dict(dataset=dict(split="train", **knn_dataset), **knn_loader),
    val_dataloader=dict(dataset=dict(split="val", **knn_dataset), **knn_loader),
    interval=31,
    most_images=20_000,
)

custom_hooks = [dict(type="mapet_mm.TokenStoreCheckHook"), knn_probe]
