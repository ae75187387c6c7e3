# Scenes as detectors take them: the dataset's, with the boxes that tools/dataset_converters/scene_boxes.py
# writes; 64 x 64 pixels and patches of 4, so 256 tokens. Recipes name their pipelines, datasets and
# models.
_base_ = ["vit-micro.py", "data.py"]

scene_size = 64
scene_root = _base_.train_scenes.data_root
boxes_root = f"{_base_.train_scenes.data_root}_boxes"
thing_classes = _base_.scene_classes[1:]

backbone = dict(
    type="mapet_mm.MaPeTViT",
    arch=_base_.arch,
    img_size=scene_size,
    patch_size=_base_.patch_size,
    out_type="featmap",
    init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
)

train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type="DefaultSampler", shuffle=True),
)
val_dataloader = dict(
    batch_size=20,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type="DefaultSampler", shuffle=False),
)
test_dataloader = val_dataloader

optim_wrapper = dict(
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    paramwise_cfg=dict(layer_decay_rate=0.75),
    optimizer=dict(type="AdamW", fused=True, lr=1e-3, weight_decay=0.05),
    clip_grad=dict(max_norm=5.0),
)
max_epochs = 12
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, begin=0, end=50, by_epoch=False),
    dict(type="CosineAnnealingLR", eta_min=0.0, begin=0, end=max_epochs, by_epoch=True),
]
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=max_epochs, val_interval=max_epochs)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
