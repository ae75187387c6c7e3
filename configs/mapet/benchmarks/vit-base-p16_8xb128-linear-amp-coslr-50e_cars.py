# Linear probe on Stanford Cars, in the layout that MMPretrain's `StanfordCars` reads.
_base_ = "vit-base-p16_8xb128-linear-amp-coslr-50e_in1k.py"

model = dict(head=dict(num_classes=196))
data_preprocessor = dict(num_classes=196)

train_dataloader = dict(dataset=dict(type="StanfordCars", data_root="data/stanford_cars", split="train"))
val_dataloader = dict(dataset=dict(type="StanfordCars", data_root="data/stanford_cars", split="test"))
test_dataloader = val_dataloader
