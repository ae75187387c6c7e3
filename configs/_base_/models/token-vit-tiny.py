# ViT-T over token embeddings; the mean of the last layer is classified, as in fine-tuning.
model = dict(
    type="ImageClassifier",
    backbone=dict(
        type="mapet_mm.TokenViT",
        vocab_size=8192,
        grid=14,
        arch="deit-tiny",
        drop_path_rate=0.1,
        out_type="avg_featmap",
        final_norm=False,
    ),
    neck=None,
    head=dict(type="LinearClsHead", num_classes=1000, in_channels=192, loss=dict(type="CrossEntropyLoss")),
)
