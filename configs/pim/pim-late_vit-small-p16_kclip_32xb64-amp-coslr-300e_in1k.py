_base_ = "pim_vit-small-p16_kclip_32xb64-amp-coslr-300e_in1k.py"

# An extension: the query stream runs in the last third of the layers only.
model = dict(backbone=dict(type="mapet_mm.LateQueryViT", query_from_layer=8))
