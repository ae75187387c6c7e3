"""The recipes with a ViT of width 24, quick enough to run."""

from pathlib import Path

from config_building import load
from mmengine.config import Config, ConfigDict

WIDTH = 24
# What says a width in a decoder; a head behind MLANeck gets its maps.
NECKS = {
    "mapet_mm.BatchNormNeck": dict(channels=WIDTH),
    "Feature2Pyramid": dict(embed_dim=WIDTH),
    "mapet_mm.SimpleFeaturePyramid": dict(in_channels=WIDTH),
    "MLANeck": dict(in_channels=[WIDTH] * 4, out_channels=8),
}
HEADS = {
    "DPTHead": dict(in_channels=[WIDTH] * 4, embed_dims=WIDTH, post_process_channels=[8] * 4, channels=8),
    "Mask2FormerHead": dict(in_channels=[256] * 4),
    "SegmenterMaskTransformerHead": dict(in_channels=WIDTH, embed_dims=WIDTH, channels=WIDTH, num_heads=3),
    "SETRMLAHead": dict(in_channels=[8] * 4, channels=32, mla_channels=8),
    "SETRUPHead": dict(in_channels=WIDTH, channels=8),
    "UPerHead": dict(in_channels=[WIDTH] * 4, channels=8),
}


def shrink_decoder(model: ConfigDict) -> None:
    """Neck and heads of a segmentor for a ViT of width 24."""
    neck, extra = model.get("neck") or {}, model.get("auxiliary_head") or []
    neck.update(NECKS.get(neck.get("type"), {}))
    width = neck.get("out_channels", WIDTH)
    for head in (model.decode_head, *(extra if isinstance(extra, list) else [extra])):
        head.update(HEADS.get(head.type) or dict(in_channels=width, channels=width))


def shrunk(path: Path) -> Config:
    """The recipe with a ViT of width 24; a tokenizer in the model is left out: features do not need it."""
    cfg = load(path)
    model = cfg.model
    if "arch" in model.backbone:
        depth = 12 if isinstance(model.backbone.arch, str) else model.backbone.arch.num_layers
        model.backbone.arch = dict(
            embed_dims=WIDTH, num_layers=depth, num_heads=3, feedforward_channels=2 * WIDTH
        )
        head = model.get("head") or {}
        head.update({key: WIDTH for key in ("in_channels", "embed_dims") if key in head})
    if "embed_dim" in model.backbone:  # timm's
        model.backbone.embed_dim = model.head.embed_dims = WIDTH
    if model.type == "EncoderDecoder":
        shrink_decoder(model)
        if "model_name" in model.backbone:  # timm's
            model.backbone.update(embed_dim=WIDTH, num_heads=3)
        if path.parent.name == "segmentation":  # a quarter of the size
            model.backbone.img_size = 128
            model.data_preprocessor.size = (128, 128)
            if "size" in model.data_preprocessor.test_cfg:  # else whole patches
                model.data_preprocessor.test_cfg.size = (128, 128)
            if model.test_cfg.mode == "slide":
                model.test_cfg.update(crop_size=(128, 128), stride=(85, 85))
            for pipeline in (cfg.test_pipeline, cfg.test_dataloader.dataset.pipeline):
                pipeline[1].scale = (512, 128)
    elif "encoder_dims" in (model.get("neck") or {}):
        model.neck.update(encoder_dims=WIDTH, embed_dims=12, num_heads=3)
    if "tokenizer" in cfg:
        model.target_generator = None
    return cfg
