# An encoder of the visible half of the patches, and two layers of MaPeT's to predict the others.
_base_ = "visible-mim_vit-micro_kclip_1xb32-amp-coslr.py"

custom_imports = dict(imports=["lab.other_targets"])
model = dict(
    type="mapet_mm.VisibleMaPeT",
    neck=dict(
        _delete_=True,
        type="mapet_mm.MaPeTPretrainViT",
        arch=dict(_base_.arch, num_layers=2),
        img_size=_base_.img_size,
        patch_size=_base_.patch_size,
        objective="mapet",
        cutting_point=_base_.model.backbone.cutting_point,
    ),
)
