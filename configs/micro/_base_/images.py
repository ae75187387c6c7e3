# The images of the dataset, read in the training process.
_base_ = "data.py"

data_preprocessor = dict(mean=_base_.mean, std=_base_.std, to_rgb=True)

pack = dict(type="PackInputs")

train_dataloader = dict(
    batch_size=64,
    num_workers=0,  # decoding a small image takes less time than handing it over
    persistent_workers=False,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=_base_.train_images,
)
val_dataloader = dict(
    batch_size=250,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=_base_.val_images,
)
test_dataloader = val_dataloader
