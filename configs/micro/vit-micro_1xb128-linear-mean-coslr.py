# The simple linear probe: one linear layer on the mean of the last layer's patch tokens.
# The checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = "vit-micro_1xb128-linear-coslr.py"

model = dict(
    backbone=dict(out_type="avg_featmap", out_indices=-1),
    head=dict(
        _delete_=True,
        type="LinearClsHead",
        num_classes=_base_.num_classes,
        in_channels=_base_.arch.embed_dims,
        loss=dict(type="CrossEntropyLoss"),
    ),
)
val_evaluator = dict(_delete_=True, type="Accuracy", topk=(1,))
test_evaluator = dict(_delete_=True, type="Accuracy", topk=(1,))

optim_wrapper = dict(optimizer=dict(lr=6e-2))
