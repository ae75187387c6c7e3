# The simple linear probe: one linear layer on what fine-tuning classifies, the mean of the last layer's patch
# tokens. The LayerNorm behind it has no weights in a pre-training checkpoint and stays frozen at scale 1 and
# shift 0, so it only brings the features to one scale.
_base_ = "vit-base-p16_8xb128-linear-amp-coslr-50e_in1k.py"

model = dict(
    backbone=dict(out_type="avg_featmap", out_indices=-1),
    head=dict(
        _delete_=True,
        type="LinearClsHead",
        num_classes=1000,
        in_channels=768,
        loss=dict(type="CrossEntropyLoss"),
    ),
)

val_evaluator = dict(_delete_=True, type="Accuracy", topk=(1, 5))
test_evaluator = dict(_delete_=True, type="Accuracy", topk=(1, 5))
