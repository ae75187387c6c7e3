_base_ = "_base_/token-vit-micro.py"

train_dataloader = dict(dataset=dict(pipeline=_base_.grid_tokens))
val_dataloader = dict(dataset=dict(pipeline=_base_.grid_tokens))
test_dataloader = val_dataloader
