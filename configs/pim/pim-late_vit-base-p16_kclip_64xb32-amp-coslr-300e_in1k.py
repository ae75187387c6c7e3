_base_ = "pim_vit-base-p16_kclip_64xb32-amp-coslr-300e_in1k.py"

# An extension: the query stream runs in the last third of the layers only.
model = dict(backbone=dict(type="mapet_mm.LateQueryViT", query_from_layer=8))
