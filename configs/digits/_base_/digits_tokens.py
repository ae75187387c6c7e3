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
# Images from an inferencer have no path and need no tokens (`mmpretrain.FeatureExtractor`).
load_known_tokens = dict(load_tokens, optional=True)
test_dataloader = dict(dataset=dict(pipeline=[_base_.load, load_known_tokens, pack]))
val_evaluator = dict(type="mapet_mm.TokenAccuracy")
test_evaluator = val_evaluator
val_cfg = dict()
test_cfg = dict()

knn_loader = dict(batch_size=250, num_workers=0)
knn_dataset = dict(
    type="CustomDataset", data_root="data/digits", pipeline=[_base_.load, dict(type="PackInputs")]
)
knn_train = dict(data_prefix="train", ann_file="meta/train.txt", **knn_dataset)
knn_val = dict(data_prefix="val", ann_file="meta/val.txt", **knn_dataset)
knn_probe = dict(
    type="mapet_mm.KNNProbeHook",
    train_dataloader=dict(dataset=knn_train, **knn_loader),
    val_dataloader=dict(dataset=knn_val, **knn_loader),
    interval=4,
)

custom_hooks = [
    # Training does not start on tokens of another codebook.
    dict(type="mapet_mm.TokenStoreCheckHook", codebook="work_dirs/digits/codebook.safetensors"),
    knn_probe,
]
