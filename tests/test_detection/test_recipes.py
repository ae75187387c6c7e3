"""Each recipe of detection and pose estimation trains and is evaluated, on images in its data's layout."""

from pathlib import Path

import pytest
from dense_folders import write_dense

TINY = dict(_delete_=True, embed_dims=96, num_layers=1, num_heads=3, feedforward_channels=96)
SMALL = {
    "model.backbone.arch": TINY,
    "model.backbone.img_size": 64,
    "model.neck.in_channels": 96,
    "model.data_preprocessor.pad_size_divisor": 64,
}
TIMM = dict(_delete_=True, type="mapet_mm.TIMMViT", model_name="vit_small_patch16_dinov3")
TIMM.update(embed_dim=96, depth=1, num_heads=3)
LSJ = {
    **SMALL,
    "train_dataloader.dataset.pipeline.2.scale": (64, 64),
    "train_dataloader.dataset.pipeline.3.crop_size": (64, 64),
    "val_dataloader.dataset.pipeline.1.scale": (64, 64),
}
RECIPES = {
    "detection/mapet_vit-base-p16_mask-rcnn_64xb1-100e_coco-1024x1024.py": (
        {**LSJ, "model.test_cfg.rcnn.score_thr": 0.0},  # untrained, it finds nothing otherwise
        "coco/segm_mAP",
    ),
    "detection/dinov3-base-p16_mask-rcnn_64xb1-100e_coco-1024x1024.py": (
        {
            **{name: value for name, value in LSJ.items() if not name.startswith("model.backbone")},
            "model.backbone": TIMM,
            "model.test_cfg.rcnn.score_thr": 0.0,
        },
        "coco/segm_mAP",
    ),
    "detection/mapet_vit-base-p16_dino_16xb1-12e_coco-1024x1024.py": (
        {**LSJ, "model.num_queries": 50},
        "coco/bbox_mAP",
    ),
    "detection/mapet_vit-base-p16_oriented-rcnn_8xb2-12e_dota-1024x1024.py": (
        {
            **SMALL,
            "train_dataloader.dataset.pipeline.3.scale": (64, 64),
            "val_dataloader.dataset.pipeline.1.scale": (64, 64),
        },
        "dota/mAP",
    ),
    "pose/mapet_vit-base-p16_vitpose_8xb64-210e_coco-256x192.py": (
        {"model.backbone.arch": TINY, "model.head.in_channels": 96, "val_dataloader.dataset.bbox_file": None},
        "coco/AP",
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains_and_is_evaluated(recipe, train_and_evaluate):
    options, figure = RECIPES[recipe]
    runner, figures = train_and_evaluate(recipe, options)
    assert 0 <= figures[figure] <= 1
    state = runner.optim_wrapper.optimizer.state
    assert [name for name, p in runner.model.named_parameters() if p.requires_grad and p not in state] == []
    (log,) = Path(runner._log_dir).glob("*.log")
    assert "is told maps of strides" not in log.read_text()


def test_mask2former_trains_and_segments_scenes(train_and_evaluate, data):
    write_dense(data / "data/ade/ADEChallengeData2016", "ade20k", train=4, val=2)
    recipe = "segmentation/dinov3-base-p16_mask2former_8xb2-amp-160k_ade20k-512x512.py"
    options = {
        "model.backbone": dict(TIMM, out_indices=[0]),
        "model.neck.in_channels": 96,
        "model.data_preprocessor.size": (64, 64),
        "model.decode_head.num_queries": 10,
        "train_dataloader.dataset.pipeline.2.scale": (256, 64),
        "train_dataloader.dataset.pipeline.3.crop_size": (64, 64),
        "val_dataloader.dataset.pipeline.1.scale": (256, 64),
        "train_cfg": dict(_delete_=True, type="IterBasedTrainLoop", max_iters=2, val_interval=2),
        "default_hooks.checkpoint.interval": 2,
    }
    runner, figures = train_and_evaluate(recipe, options)
    assert 0 <= figures["mIoU"] <= 100
    decayed = {}
    for group in runner.optim_wrapper.optimizer.param_groups:
        decayed.update({id(parameter): group["weight_decay"] for parameter in group["params"]})
    head = runner.model.decode_head
    assert decayed[id(head.query_feat.weight)] == 0
    assert decayed[id(runner.model.backbone.timm_model.reg_token)] == 0
