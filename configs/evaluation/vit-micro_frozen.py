# The frozen columns of the small datasets' tables: ViT-micro, and the protocols that they show.
# The checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = ["micro.py", "../micro/_base_/vit-micro.py"]

data_preprocessor = dict(mean=_base_.mean, std=_base_.std, to_rgb=True)
model = dict(
    type="mapet_mm.MaPeTViT",
    arch=_base_.arch,
    img_size=_base_.img_size,
    patch_size=_base_.patch_size,
    init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
)
evaluation = dict(
    protocols=[
        dict(type="NearestNeighbours"),
        dict(type="LowShot", shots=[10]),
        dict(type="AttentiveProbe"),
        dict(type="SegmentationByNeighbours"),
    ]
)
