# Linear probe on FGVC-Aircraft, in the layout that MMPretrain's `FGVCAircraft` reads.
_base_ = "vit-base-p16_8xb128-linear-amp-coslr-50e_in1k.py"

model = dict(head=dict(num_classes=100))
data_preprocessor = dict(num_classes=100)

train_dataloader = dict(
    dataset=dict(type="FGVCAircraft", data_root="data/fgvc-aircraft-2013b", split="trainval")
)
val_dataloader = dict(dataset=dict(type="FGVCAircraft", data_root="data/fgvc-aircraft-2013b", split="test"))
test_dataloader = val_dataloader
