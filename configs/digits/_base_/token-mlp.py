_base_ = "../../_base_/models/token-mlp.py"

model = dict(backbone=dict(vocab_size=128), head=dict(num_classes=10))
