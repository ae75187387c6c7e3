_base_ = ["vit-micro-p4.py", "../../_base_/models/token-vit-tiny.py"]

model = dict(
    backbone=dict(vocab_size=128, grid=6, arch=dict(_delete_=True, **_base_.arch)),
    head=dict(num_classes=10, in_channels=96),
)
