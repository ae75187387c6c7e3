# SETR's progressive upsampling of the last layer, and auxiliary losses on the three before, on few labelled
# scenes. The checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = "vit-micro_upernet_1xb8-poly.py"

head = dict(
    type="SETRUPHead",
    in_channels=_base_.arch.embed_dims,
    channels=64,
    dropout_ratio=0.0,
    num_classes=len(_base_.scene_classes),
    norm_cfg=_base_.norm_cfg,
    align_corners=False,
)
loss = dict(type="CrossEntropyLoss", use_sigmoid=False, class_weight=_base_.scene_class_weights)
model = dict(
    neck=None,
    # Two doublings: the patches are small.
    decode_head=dict(_delete_=True, in_index=3, num_convs=2, up_scale=2, loss_decode=loss, **head),
    auxiliary_head=[
        dict(in_index=layer, num_convs=1, up_scale=4, loss_decode=dict(loss_weight=0.4, **loss), **head)
        for layer in range(3)
    ],
)
