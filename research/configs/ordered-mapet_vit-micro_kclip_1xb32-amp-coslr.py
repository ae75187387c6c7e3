# MaPeT in an order that follows from the tokens.
_base_ = "mapet_vit-micro_kclip_1xb32-amp-coslr.py"

custom_imports = dict(imports=["lab.orders"])
model = dict(
    type="mapet_mm.OrderedMaPeT",
    order="rare first",
    store=_base_.token_stores[_base_.tokens],
    codebook=_base_.grid_codebook_file,
)
