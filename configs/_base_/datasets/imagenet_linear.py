# ImageNet-1k for the linear probe: random resized crop, bilinear as in BEiT's script, and flip; 256 -> 224 in
# the test.
_base_ = "imagenet_labels.py"

train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="RandomResizedCrop", scale=224, backend="pillow", interpolation="bilinear"),
    dict(type="RandomFlip", prob=0.5, direction="horizontal"),
    dict(type="PackInputs"),
]

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))

val_evaluator = dict(_delete_=True, type="mapet_mm.LayerwiseAccuracy")
test_evaluator = dict(_delete_=True, type="mapet_mm.LayerwiseAccuracy")
