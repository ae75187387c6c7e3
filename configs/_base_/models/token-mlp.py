# The paper's light classifier of tokens: embedding -> linear 192 -> ReLU -> mean -> linear.
model = dict(
    type="ImageClassifier",
    backbone=dict(type="mapet_mm.TokenMLP", vocab_size=8192, embed_dims=192),
    neck=None,
    head=dict(type="LinearClsHead", num_classes=1000, in_channels=192, loss=dict(type="CrossEntropyLoss")),
)
