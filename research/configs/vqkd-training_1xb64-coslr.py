# The dataset's VQ-KD, trained to give the features of its CLIP's tower.
_base_ = [
    "../../configs/micro/_base_/images.py",
    "../../configs/micro/_base_/runtime.py",
    "_base_training.py",
]

image_size = _base_.clip_stride * _base_.grid
view = dict(type="ResizeEdge", scale=_base_.img_size, edge="short", backend="pillow", interpolation="bicubic")
views = dict(type="MultiView", num_views=[1, 1], transforms=[[view], [dict(view, scale=image_size)]])
train_dataloader = dict(dataset=dict(pipeline=[*_base_.load, views, _base_.pack]))
val_dataloader = val_evaluator = val_cfg = None
test_dataloader = test_evaluator = test_cfg = None

data_preprocessor = dict(
    type="mapet_mm.TwoViewDataPreprocessor",
    mean=[127.5, 127.5, 127.5],
    std=[127.5, 127.5, 127.5],
    second_mean=[122.7709383, 116.7460125, 104.09373615],
    second_std=[68.5005327, 66.6321579, 70.32316305],
)
teacher_weights = _base_.clip_checkpoint if _base_.clip_training else _base_.clip_weights
model = dict(
    type="mapet_mm.VQKDDistillation",
    tokenizer=dict(
        encoder_config=dict(
            arch=_base_.vqkd_encoder,
            img_size=_base_.img_size,
            patch_size=_base_.patch_size,
            final_norm=True,
            out_type="featmap",
            use_abs_pos_emb=True,
            use_rel_pos_bias=False,
            layer_scale_init_value=0.0,
        ),
        num_embed=_base_.vocab_size,
        **dict(_base_.vqkd, quantize_kmeans_init=True),
    ),
    teacher=dict(
        type="mapet_mm.KCLIP",
        clip_model=dict(image_size=image_size, **_base_.clip_resnet),
        pretrained=teacher_weights,
        stride=_base_.clip_stride,
    ),
    grid=(_base_.grid, _base_.grid),
)
trained = dict(config=_base_.clip_training, checkpoint=_base_.clip_checkpoint)
trained_by = trained if _base_.clip_training else None

param_scheduler = [dict(end=_base_.vqkd_epochs, **_base_.cosine)]
train_cfg = dict(by_epoch=True, max_epochs=_base_.vqkd_epochs)
