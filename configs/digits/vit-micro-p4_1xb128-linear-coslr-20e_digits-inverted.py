_base_ = "vit-micro-p4_1xb128-linear-coslr-20e_digits.py"

train_dataloader = dict(dataset=dict(data_root="data/digits_inverted"))
val_dataloader = dict(dataset=dict(data_root="data/digits_inverted"))
test_dataloader = val_dataloader
