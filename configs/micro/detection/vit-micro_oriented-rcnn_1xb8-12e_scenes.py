# Oriented R-CNN on scenes: the smallest rectangles around the things, of any angle. The checkpoint goes into
# `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = [
    "../../_base_/models/oriented-rcnn_vit-base-p16.py",
    "../_base_/scenes_detection.py",
    "../../_base_/default_runtime_rotated.py",
]

default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=-1, save_last=True))

strides = [4, 8]
model = dict(
    data_preprocessor=dict(mean=_base_.mean, std=_base_.std, pad_size_divisor=1),
    backbone=dict(_delete_=True, **_base_.backbone),
    neck=dict(in_channels=_base_.arch.embed_dims, out_channels=64, scale_factors=(1, 0.5), num_outs=2),
    rpn_head=dict(in_channels=64, feat_channels=64, anchor_generator=dict(scales=[5], strides=strides)),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64, featmap_strides=strides, finest_scale=16),
        bbox_head=dict(in_channels=64, fc_out_channels=128, num_classes=len(_base_.thing_classes)),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=200, max_per_img=100),
        rcnn=dict(sampler=dict(num=32)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=50), rcnn=dict(nms_pre=100, max_per_img=20)),
)

load = [
    dict(type="mmdet.LoadImageFromFile"),
    dict(type="mmdet.LoadAnnotations", with_bbox=True, box_type="qbox"),
    dict(type="ConvertBoxType", box_type_mapping=dict(gt_bboxes="rbox")),
    dict(type="mmdet.Resize", scale=(_base_.scene_size, _base_.scene_size)),
]
keys = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
scenes_dota = dict(
    type="DOTADataset", img_suffix="png", metainfo=dict(classes=_base_.thing_classes), data_root=""
)
train_dataloader = dict(
    dataset=dict(
        ann_file=f"{_base_.boxes_root}/rotated/training",
        data_prefix=dict(img_path=f"{_base_.scene_root}/{_base_.train_scenes.data_prefix.img_path}"),
        pipeline=[*load, dict(type="mmdet.PackDetInputs")],
        **scenes_dota,
    ),
)
val_dataloader = dict(
    dataset=dict(
        ann_file=f"{_base_.boxes_root}/rotated/validation",
        data_prefix=dict(img_path=f"{_base_.scene_root}/{_base_.val_scenes.data_prefix.img_path}"),
        test_mode=True,
        pipeline=[*load, dict(type="mmdet.PackDetInputs", meta_keys=keys)],
        **scenes_dota,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="DOTAMetric", metric="mAP")
test_evaluator = val_evaluator
