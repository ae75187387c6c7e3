# Digits with stored k-CLIP token grids; as in the paper, colour jitter is the only augmentation.
_base_ = "digits.py"

data_preprocessor = dict(type="mapet_mm.TokenGridDataPreprocessor")

load_tokens = dict(type="mapet_mm.LoadTokenGrid", store="work_dirs/digits/tokens")
color_jitter = dict(type="ColorJitter", brightness=0.4, contrast=0.4, saturation=0.4)
pack = dict(type="PackInputs", algorithm_keys=["token_grid"])

train_dataloader = dict(
    batch_size=32,
    dataset=dict(pipeline=[_base_.load, color_jitter, load_tokens, pack]),
)
val_dataloader = dict(dataset=dict(pipeline=[_base_.load, load_tokens, pack]))
test_dataloader = val_dataloader
val_evaluator = dict(type="mapet_mm.TokenAccuracy")
test_evaluator = val_evaluator
val_cfg = dict()
test_cfg = dict()

# Training does not start on tokens of another codebook.
custom_hooks = [
    dict(type="mapet_mm.TokenStoreCheckHook", codebook="work_dirs/digits/codebook.safetensors"),
]
