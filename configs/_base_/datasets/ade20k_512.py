# ADE20K at 512 x 512, with MMSegmentation's augmentations.
_base_ = "segmentation_512.py"

train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", reduce_zero_label=True),
    dict(type="RandomResize", scale=(2048, 512), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type="RandomCrop", crop_size=(512, 512), cat_max_ratio=0.75),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PhotoMetricDistortion"),
    dict(type="PackSegInputs"),
]

# Labels are loaded after the resize: they are compared at their own size.
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(2048, 512), keep_ratio=True),
    dict(type="LoadAnnotations", reduce_zero_label=True),
    dict(type="PackSegInputs"),
]
tta_sizes = [[int(side * by) for side in test_pipeline[1]["scale"]] for by in _base_.tta_scales]
tta_views = [
    [dict(test_pipeline[1], scale=tuple(size)) for size in tta_sizes],
    _base_.tta_whole_patches,
    _base_.tta_flips,
    *([step] for step in test_pipeline[2:]),
]
tta_pipeline = [test_pipeline[0], dict(type="TestTimeAug", transforms=tta_views)]

train_dataloader = dict(
    dataset=dict(
        type="ADE20KDataset",
        data_root="data/ade/ADEChallengeData2016",
        data_prefix=dict(img_path="images/training", seg_map_path="annotations/training"),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    dataset=dict(
        type="ADE20KDataset",
        data_root="data/ade/ADEChallengeData2016",
        data_prefix=dict(img_path="images/validation", seg_map_path="annotations/validation"),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
