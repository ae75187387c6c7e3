# For tables, which evaluate the last checkpoint: in mixed precision, without validation and k-NN on the way.
_base_ = "pim-late_vit-micro_kclip_1xb32-coslr.py"

optim_wrapper = dict(type="mapet_mm.AutocastOptimWrapper")
custom_hooks = _base_.custom_hooks[:1]
val_dataloader = val_cfg = val_evaluator = None
