_base_ = "imagenet_grids.py"

load_tokens = dict(type="mapet_mm.LoadTokenGrid", store="data/imagenet/tokens/dalle_8192")
pipeline = [load_tokens, _base_.pack]

train_dataloader = dict(dataset=dict(pipeline=pipeline))
val_dataloader = dict(dataset=dict(pipeline=pipeline))
test_dataloader = val_dataloader
