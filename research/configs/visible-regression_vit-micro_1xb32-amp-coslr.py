# The encoder of the visible half of the patches, on k-CLIP's features instead of their clusters.
_base_ = "visible-mim_vit-micro_kclip_1xb32-amp-coslr.py"

custom_imports = dict(imports=["lab.other_targets"])
image_size = _base_.clip_stride * _base_.grid
enlarge = dict(type="ResizeEdge", scale=image_size, edge="short", backend="pillow", interpolation="bicubic")
views = dict(type="MultiView", num_views=[1, 1], transforms=[[_base_.color_jitter], [enlarge]])
train_dataloader = dict(dataset=dict(pipeline=[*_base_.load, views, dict(type="PackInputs")]))
data_preprocessor = dict(
    _delete_=True,
    type="mapet_mm.TwoViewDataPreprocessor",
    mean=_base_.mean,
    std=_base_.std,
    # CLIP's own, in 0..255.
    second_mean=[122.7709383, 116.7460125, 104.09373615],
    second_std=[68.5005327, 66.6321579, 70.32316305],
    to_rgb=True,
)
custom_hooks = []  # it reads no tokens

clip_resnet = _base_.clip_resnet
model = dict(
    type="mapet_mm.VisibleFeatureRegression",
    head=dict(
        _delete_=True,
        type="mapet_mm.FeatureRegressionHead",
        embed_dims=_base_.arch.embed_dims,
        feature_dims=32 * clip_resnet.width,
    ),
    target_generator=dict(
        _delete_=True,
        type="mapet_mm.KCLIPFeatures",
        clip_model=dict(image_size=image_size, **clip_resnet),
        pretrained=_base_.clip_checkpoint if _base_.clip_training else _base_.clip_weights,
        stride=_base_.clip_stride,
    ),
)
trained = dict(config=_base_.clip_training, checkpoint=_base_.clip_checkpoint)
trained_by = trained if _base_.clip_training else None
