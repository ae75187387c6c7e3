_base_ = ["../../_base_/models/token-mlp.py", "tokens_alone.py"]

model = dict(backbone=dict(vocab_size=_base_.vocab_size), head=dict(num_classes=_base_.num_classes))
