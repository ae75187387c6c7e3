# The embedded digits (tools/dataset_converters/digits.py) at 24 px: 6 x 6 patches of 4 px, 37 tokens.
data_root = "data/digits"
data_preprocessor = dict(mean=[127.5, 127.5, 127.5], std=[63.75, 63.75, 63.75], to_rgb=True)

load = dict(type="LoadImageFromFile")
pack = dict(type="PackInputs")

train_dataloader = dict(
    batch_size=64,
    num_workers=0,  # decoding a digit takes less time than handing it over
    persistent_workers=False,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="CustomDataset", data_root=data_root, data_prefix="train", ann_file="meta/train.txt"),
)
val_dataloader = dict(
    batch_size=250,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="CustomDataset", data_root=data_root, data_prefix="val", ann_file="meta/val.txt"),
)
test_dataloader = val_dataloader
