# ImageNet-1k's stored token grids as the only input: no image is read. A tokenizer's file adds the store.
data_preprocessor = dict(num_classes=1000)  # no mean, no deviation: ids stay ids
pack = dict(type="PackInputs", input_key="token_grid")

train_dataloader = dict(
    batch_size=128,
    num_workers=4,
    persistent_workers=True,
    pin_memory=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="ImageNet", data_root="data/imagenet", split="train"),
)

val_dataloader = dict(
    batch_size=1024,
    num_workers=4,
    persistent_workers=True,
    pin_memory=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="ImageNet", data_root="data/imagenet", split="val"),
)
val_evaluator = dict(type="Accuracy", topk=(1, 5))

test_dataloader = val_dataloader
test_evaluator = val_evaluator

custom_hooks = [dict(type="mapet_mm.TokenStoreCheckHook")]
