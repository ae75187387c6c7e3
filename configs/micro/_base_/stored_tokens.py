# Images with stored token grids; as in the paper, colour jitter is the only augmentation.
_base_ = "images.py"

data_preprocessor = dict(type="mapet_mm.TokenGridDataPreprocessor")

load_tokens = dict(type="mapet_mm.LoadTokenGrid", store=_base_.token_stores[_base_.tokens])
color_jitter = dict(type="ColorJitter", brightness=0.4, contrast=0.4, saturation=0.4)
pack = dict(type="PackInputs", algorithm_keys=["token_grid"])

train_dataloader = dict(
    batch_size=32,
    dataset=dict(pipeline=[*_base_.load, color_jitter, load_tokens, pack]),
)
val_dataloader = dict(dataset=dict(pipeline=[*_base_.load, load_tokens, pack]))
# Images from an inferencer have no path and need no tokens (`mmpretrain.FeatureExtractor`).
load_known_tokens = dict(load_tokens, optional=True)
test_dataloader = dict(dataset=dict(pipeline=[*_base_.load, load_known_tokens, pack]))
val_evaluator = dict(type="mapet_mm.TokenAccuracy")
test_evaluator = val_evaluator
val_cfg = dict()
test_cfg = dict()

knn_loader = dict(batch_size=250, num_workers=0)
knn_pipeline = [*_base_.load, dict(type="PackInputs")]
knn_probe = dict(
    type="mapet_mm.KNNProbeHook",
    train_dataloader=dict(dataset=dict(pipeline=knn_pipeline, **_base_.train_images), **knn_loader),
    val_dataloader=dict(dataset=dict(pipeline=knn_pipeline, **_base_.val_images), **knn_loader),
    interval=4,
)

custom_hooks = [
    # Training does not start on tokens of another codebook.
    dict(type="mapet_mm.TokenStoreCheckHook", codebook=_base_.codebooks[_base_.tokens]),
    knn_probe,
]
