# BEiT with a loss of the visible patches as well.
_base_ = "beit_vit-micro_kclip_1xb32-amp-coslr.py"

custom_imports = dict(imports=["lab.other_targets"])
model = dict(head=dict(type="mapet_mm.BEiTContextHead", context_loss=0.5))
