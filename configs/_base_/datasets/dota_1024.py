# DOTA v1.0 in patches of 1024 x 1024, as MMRotate's `img_split.py` cuts it; annotations and images of a
# part side by side. The test set's labels are not public: the validation part is evaluated, so train on it
# as well, with train_dataloader.dataset.{ann_file,data_prefix.img_path}, only for a submission to DOTA's
# server.
size = (1024, 1024)

train_pipeline = [
    dict(type="mmdet.LoadImageFromFile"),
    dict(type="mmdet.LoadAnnotations", with_bbox=True, box_type="qbox"),
    dict(type="ConvertBoxType", box_type_mapping=dict(gt_bboxes="rbox")),
    dict(type="mmdet.Resize", scale=size, keep_ratio=True),
    dict(type="mmdet.RandomFlip", prob=0.75, direction=["horizontal", "vertical", "diagonal"]),
    dict(type="mmdet.PackDetInputs"),
]
test_pipeline = [
    dict(type="mmdet.LoadImageFromFile"),
    dict(type="mmdet.Resize", scale=size, keep_ratio=True),
    dict(type="mmdet.LoadAnnotations", with_bbox=True, box_type="qbox"),
    dict(type="ConvertBoxType", box_type_mapping=dict(gt_bboxes="rbox")),
    dict(
        type="mmdet.PackDetInputs",
        meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor"),
    ),
]

train_dataloader = dict(
    batch_size=2,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(
        type="DOTADataset",
        data_root="data/split_ss_dota",
        ann_file="train/annfiles/",
        data_prefix=dict(img_path="train/images/"),
        filter_cfg=dict(filter_empty_gt=True),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="DOTADataset",
        data_root="data/split_ss_dota",
        ann_file="val/annfiles/",
        data_prefix=dict(img_path="val/images/"),
        test_mode=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="DOTAMetric", metric="mAP")
test_evaluator = val_evaluator
