_base_ = ["vit-micro.py", "../../_base_/models/token-vit-tiny.py", "tokens_alone.py"]

model = dict(
    backbone=dict(vocab_size=_base_.vocab_size, grid=_base_.grid, arch=dict(_delete_=True, **_base_.arch)),
    head=dict(num_classes=_base_.num_classes, in_channels=_base_.arch.embed_dims),
)
