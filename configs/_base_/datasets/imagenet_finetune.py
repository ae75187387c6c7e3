# ImageNet-1k for fine-tuning, with timm's augmentations as the authors set them (docs/fidelity.md).
_base_ = "imagenet_labels.py"

# timm's rand-m9-mstd0.5. MMPretrain has only its variant `inc1`, which BEiT and DeiT use:
# `train_dataloader.dataset.pipeline.3.policies=timm_increasing` changes to it.
# The colour factors 0.1 to 1.9 have no sign to draw. timm rounds the bits of Posterize and the threshold of
# Solarize down, MMPretrain up: a range that lies just above one less does the same.
rand_augment = dict(
    type="RandAugment",
    policies=[
        dict(type="AutoContrast"),
        dict(type="Equalize"),
        dict(type="Invert"),
        dict(type="Rotate", magnitude_range=(0, 30)),
        dict(type="Posterize", magnitude_range=(-1 + 1e-6, 3 + 1e-6)),
        dict(type="Solarize", magnitude_range=(-1 + 1e-6, 255 + 1e-6)),
        dict(type="SolarizeAdd", magnitude_range=(0, 110)),
        dict(type="ColorTransform", magnitude_range=(-0.9, 0.9), random_negative_prob=0.0),
        dict(type="Contrast", magnitude_range=(-0.9, 0.9), random_negative_prob=0.0),
        dict(type="Brightness", magnitude_range=(-0.9, 0.9), random_negative_prob=0.0),
        dict(type="Sharpness", magnitude_range=(-0.9, 0.9), random_negative_prob=0.0),
        dict(type="Shear", magnitude_range=(0, 0.3), direction="horizontal"),
        dict(type="Shear", magnitude_range=(0, 0.3), direction="vertical"),
        dict(type="Translate", magnitude_range=(0, 0.45), direction="horizontal"),
        dict(type="Translate", magnitude_range=(0, 0.45), direction="vertical"),
    ],
    num_policies=2,
    total_level=10,
    magnitude_level=9,
    magnitude_std=0.5,
    # Images are BGR until the preprocessor: so are the fill colours, ImageNet's mean and deviation.
    hparams=dict(pad_val=[104, 116, 124], interpolation="bicubic"),
)
erasing = dict(
    type="RandomErasing",
    erase_prob=0.25,
    mode="rand",
    min_area_ratio=0.02,
    max_area_ratio=1 / 3,
    fill_color=[103.53, 116.28, 123.675],
    fill_std=[57.375, 57.12, 58.395],
)
pack = dict(type="PackInputs")
train_pipeline = [*_base_.load_cropped, rand_augment, erasing, pack]

# 0.9 of the image is seen in the test, as in the authors' validate.py.
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="ResizeEdge", scale=248, edge="short", backend="pillow", interpolation="bicubic"),
    dict(type="CenterCrop", crop_size=224),
    pack,
]

# Every step has as many images: torch.compile sees one shape, and no batch of few images takes a whole step.
train_dataloader = dict(drop_last=True, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
