# PIM whose query stream runs in the last two of four layers only.
_base_ = "../../configs/micro/pim_vit-micro_kclip_1xb32-coslr.py"

custom_imports = dict(imports=["lab.late_queries"])
model = dict(backbone=dict(type="mapet_mm.LateQueryViT", query_from_layer=2))
