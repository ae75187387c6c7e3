# ImageNet-1k with its labels; a file per task adds the pipeline of its training.
data_preprocessor = dict(
    type="mapet_mm.ClsDataPreprocessor",  # MMPretrain's, without waits for the GPU
    num_classes=1000,
    mean=[123.675, 116.28, 103.53],
    std=[58.395, 57.12, 57.375],
    to_rgb=True,
)

load_cropped = [
    dict(type="LoadImageFromFile"),
    dict(type="RandomResizedCrop", scale=224, backend="pillow", interpolation="bicubic"),
    dict(type="RandomFlip", prob=0.5, direction="horizontal"),
]

test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="ResizeEdge", scale=256, edge="short", backend="pillow", interpolation="bicubic"),
    dict(type="CenterCrop", crop_size=224),
    dict(type="PackInputs"),
]

train_dataloader = dict(
    batch_size=128,
    num_workers=14,  # as tools/slurm_train.sh asks for cores
    persistent_workers=True,
    pin_memory=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="ImageNet", data_root="data/imagenet", split="train"),
)

val_dataloader = dict(
    batch_size=128,
    num_workers=4,
    persistent_workers=True,
    pin_memory=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="ImageNet", data_root="data/imagenet", split="val", pipeline=test_pipeline),
)
val_evaluator = dict(type="Accuracy", topk=(1, 5))

test_dataloader = val_dataloader
test_evaluator = val_evaluator
