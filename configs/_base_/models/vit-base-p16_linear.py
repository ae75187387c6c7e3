# Linear classifier on a frozen ViT-B/16, which stays in eval mode.
# The pre-training checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
model = dict(
    type="ImageClassifier",
    backbone=dict(
        type="mapet_mm.MaPeTViT",
        arch="deit-base",
        img_size=224,
        patch_size=16,
        frozen_stages=12,
        # The paper probes the image-level representation: as in fine-tuning, the mean of the last layer's
        # patch tokens, without the final norm. The LayerNorm after the mean has no weights in a pre-training
        # checkpoint and stays frozen at scale 1 and shift 0, so it only brings the features to one scale.
        # Nothing is lost: the linear layer behind it can express any scale and shift that it could learn.
        out_type="avg_featmap",
        final_norm=False,
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
    neck=None,
    head=dict(type="LinearClsHead", num_classes=1000, in_channels=768, loss=dict(type="CrossEntropyLoss")),
)
