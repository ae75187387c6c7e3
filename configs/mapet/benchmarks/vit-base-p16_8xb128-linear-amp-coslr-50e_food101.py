# Linear probe on Food-101, in the layout that MMPretrain's `Food101` reads.
_base_ = "vit-base-p16_8xb128-linear-amp-coslr-50e_in1k.py"

model = dict(head=dict(num_classes=101))
data_preprocessor = dict(num_classes=101)

train_dataloader = dict(dataset=dict(type="Food101", data_root="data/food-101", split="train"))
val_dataloader = dict(dataset=dict(type="Food101", data_root="data/food-101", split="test"))
test_dataloader = val_dataloader
