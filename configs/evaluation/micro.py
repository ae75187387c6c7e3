# Frozen evaluation on a dataset of the small recipes: images with labels, and scenes with pixel labels of
# which 100 are learnt from and 50 are measured on.
_base_ = "../micro/_base_/data.py"

pipeline = [*_base_.load, dict(type="PackInputs")]
dense_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="mmseg.LoadAnnotations"),
    dict(type="mmseg.PackSegInputs"),
]
scenes = {}
if _base_.few_scenes:
    train_scenes = {**_base_.train_scenes, "type": "mmseg.BaseSegDataset"}
    val_scenes = {**_base_.val_scenes, "type": "mmseg.BaseSegDataset"}
    scenes["dense_train"] = dict(dataset=dict(pipeline=dense_pipeline, indices=100, **train_scenes))
    scenes["dense_val"] = dict(dataset=dict(pipeline=dense_pipeline, indices=50, **val_scenes))

evaluation = dict(
    train=dict(dataset=dict(pipeline=pipeline, **_base_.train_images)),
    val=dict(dataset=dict(pipeline=pipeline, **_base_.val_images)),
    **scenes,
)
