# Pascal VOC 2012 (its own 1,464 training images) at 512 x 512, with MMSegmentation's augmentations.
_base_ = "segmentation_512.py"

train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations"),
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
    dict(type="LoadAnnotations"),
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
        type="PascalVOCDataset",
        data_root="data/VOCdevkit/VOC2012",
        data_prefix=dict(img_path="JPEGImages", seg_map_path="SegmentationClass"),
        ann_file="ImageSets/Segmentation/train.txt",
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    dataset=dict(
        type="PascalVOCDataset",
        data_root="data/VOCdevkit/VOC2012",
        data_prefix=dict(img_path="JPEGImages", seg_map_path="SegmentationClass"),
        ann_file="ImageSets/Segmentation/val.txt",
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
