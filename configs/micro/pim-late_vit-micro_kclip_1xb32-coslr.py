_base_ = "pim_vit-micro_kclip_1xb32-coslr.py"

# An extension: the query stream runs in the last two of four layers only.
model = dict(backbone=dict(type="mapet_mm.LateQueryViT", query_from_layer=2))
