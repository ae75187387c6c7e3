# The simple linear probe on 100 labels: one linear layer on the mean of the last layer's patch tokens.
# The checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = "vit-micro-p4_1xb100-linear-coslr-200e_digits-100.py"

model = dict(
    backbone=dict(out_type="avg_featmap", out_indices=-1),
    head=dict(
        _delete_=True,
        type="LinearClsHead",
        num_classes=10,
        in_channels=96,
        loss=dict(type="CrossEntropyLoss"),
    ),
)
val_evaluator = dict(_delete_=True, type="Accuracy", topk=(1,))
test_evaluator = dict(_delete_=True, type="Accuracy", topk=(1,))
