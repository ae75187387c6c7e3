# The paper's linear probe, as BEiT's script does it: for each layer of a frozen ViT-B/16, one linear layer on
# class token and patch mean, not normalised; all trained together on one forward pass. The paper "follows
# BEiT", with its rate and decay, and the authors' ViT has the methods that BEiT's script calls; that they ran
# it like this, and reported the best layer as it does, is inferred. The simple probe is `-linear-mean-`.
# The pre-training checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
model = dict(
    type="mapet_mm.LinearProbe",
    backbone=dict(
        type="mapet_mm.MaPeTViT",
        arch="deit-base",
        img_size=224,
        patch_size=16,
        out_type="raw",
        out_indices=list(range(12)),
        final_norm=False,
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
    neck=None,
    head=dict(type="mapet_mm.LayerwiseLinearHead", num_classes=1000, in_channels=768, layers=12),
)
