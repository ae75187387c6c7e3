# ImageNet-1k for the linear probe: random resized crop and flip, nothing else; centre crop in evaluation.
_base_ = "imagenet_labels.py"

train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="RandomResizedCrop", scale=224, backend="pillow", interpolation="bicubic"),
    dict(type="RandomFlip", prob=0.5, direction="horizontal"),
    dict(type="PackInputs"),
]

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
