# ViTPose on the scenes' things, each cut out of its scene: centre and outermost points. The checkpoint goes
# into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = [
    "../../_base_/models/vitpose_vit-base-p16.py",
    "../_base_/scenes_detection.py",
    "../../_base_/default_runtime_pose.py",
]

default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=-1, save_last=True))

size = 32
codec = dict(type="UDPHeatmap", input_size=(size, size), heatmap_size=(size // 2, size // 2), sigma=1)
model = dict(
    data_preprocessor=dict(mean=_base_.mean, std=_base_.std),
    backbone=dict(_delete_=True, **{**_base_.backbone, "img_size": size}),
    head=dict(
        in_channels=_base_.arch.embed_dims,
        out_channels=5,
        deconv_out_channels=(64,),
        deconv_kernel_sizes=(4,),
        decoder=codec,
    ),
    test_cfg=dict(flip_test=False),
)

names = ("centre", "top", "bottom", "left", "right")
scenes_pose = dict(
    type="CocoDataset",
    data_mode="topdown",
    metainfo=dict(
        dataset_name="scenes",
        keypoint_info={
            i: dict(name=name, id=i, color=[255, 128, 0], type="", swap="") for i, name in enumerate(names)
        },
        skeleton_info={},
        joint_weights=[1.0] * len(names),
        sigmas=[0.05] * len(names),
    ),
)
load = [
    dict(type="LoadImage"),
    dict(type="GetBBoxCenterScale"),
    dict(type="TopdownAffine", input_size=(size, size), use_udp=True),
]
train_dataloader = dict(
    batch_size=32,
    dataset=dict(
        ann_file=f"{_base_.boxes_root}/training.json",
        data_prefix=dict(img=f"{_base_.scene_root}/{_base_.train_scenes.data_prefix.img_path}"),
        pipeline=[*load, dict(type="GenerateTarget", encoder=codec), dict(type="PackPoseInputs")],
        **scenes_pose,
    ),
)
val_dataloader = dict(
    batch_size=64,
    sampler=dict(round_up=False),
    dataset=dict(
        ann_file=f"{_base_.boxes_root}/validation.json",
        data_prefix=dict(img=f"{_base_.scene_root}/{_base_.val_scenes.data_prefix.img_path}"),
        test_mode=True,
        pipeline=[*load, dict(type="PackPoseInputs")],
        **scenes_pose,
    ),
)
test_dataloader = val_dataloader
# The share of key points within a tenth of the larger side of the thing's box.
val_evaluator = dict(type="PCKAccuracy", thr=0.1, norm_item="bbox")
test_evaluator = val_evaluator
