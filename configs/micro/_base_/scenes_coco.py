# Boxes and masks of the scenes' things, in COCO's format.
_base_ = ["scenes_detection.py", "../../_base_/default_runtime_det.py"]

default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=-1, save_last=True))

load = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="Resize", scale=(_base_.scene_size, _base_.scene_size)),
]
keys = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
scenes_coco = dict(type="CocoDataset", metainfo=dict(classes=_base_.thing_classes))

train_dataloader = dict(
    dataset=dict(
        ann_file=f"{_base_.boxes_root}/training.json",
        data_prefix=dict(img=f"{_base_.scene_root}/{_base_.train_scenes.data_prefix.img_path}"),
        pipeline=[*load, dict(type="PackDetInputs")],
        **scenes_coco,
    ),
)
val_dataloader = dict(
    dataset=dict(
        ann_file=f"{_base_.boxes_root}/validation.json",
        data_prefix=dict(img=f"{_base_.scene_root}/{_base_.val_scenes.data_prefix.img_path}"),
        test_mode=True,
        pipeline=[*load, dict(type="PackDetInputs", meta_keys=keys)],
        **scenes_coco,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(
    type="CocoMetric", ann_file=f"{_base_.boxes_root}/validation.json", metric=["bbox", "segm"]
)
test_evaluator = val_evaluator
