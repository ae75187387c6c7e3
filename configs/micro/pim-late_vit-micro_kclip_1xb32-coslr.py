_base_ = "pim_vit-micro_kclip_1xb32-coslr.py"

# An extension: the query stream runs in the last two of four layers only.
model = dict(backbone=dict(query_from_layer=2))
