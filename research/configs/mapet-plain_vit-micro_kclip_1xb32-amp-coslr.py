# MaPeT without color jitter, which not every sensor's pictures bear.
_base_ = "mapet_vit-micro_kclip_1xb32-amp-coslr.py"

train_dataloader = dict(dataset=dict(pipeline=[*_base_.load, _base_.load_tokens, _base_.pack]))
