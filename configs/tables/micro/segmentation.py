# The paper's segmentation table (tab:segmentation), on scenes.
_base_ = "../{{$MAPET_MM_DATA:digits}}.py"

title = f"Semantic segmentation of {_base_.data_set} scenes, k-CLIP tokens"
on_images = [_base_.mim, _base_.pim, _base_.mapet, _base_.cae, _base_.beit]
unlabelled = _base_.unlabelled_scenes
on_scenes = [
    {**row, "name": f"{row['name']}, unlabelled scenes", "data": unlabelled}
    for row in on_images
    if unlabelled
]
rows = [_base_.scratch, *on_images, *on_scenes]
indices = "train_dataloader.dataset.indices"
columns = [
    dict(
        name=f"frozen, linear, {_base_.few_scenes} scenes",
        unit="mIoU, %",
        config=_base_.linear_segmentation,
        metric="mIoU",
    ),
    dict(
        name=f"frozen, linear, all {_base_.all_scenes} scenes",
        unit="mIoU, %",
        config=_base_.linear_segmentation,
        metric="mIoU",
        options={indices: _base_.all_scenes},
    ),
    dict(
        name=f"UperNet, {_base_.few_scenes} scenes",
        unit="mIoU, %",
        config=_base_.upernet,
        metric="mIoU",
        paper={"MIM": 39.0, "PIM": 40.2, "MaPeT": 39.3, "CAE": 39.2, "BEiT": 39.9},
    ),
    dict(
        name=f"UperNet, all {_base_.all_scenes} scenes",
        unit="mIoU, %",
        config=_base_.upernet,
        metric="mIoU",
        options={indices: _base_.all_scenes},
    ),
]
notes = [
    "Unlabelled scenes: pre-trained on other scenes than the labelled ones, with tokens of their own, by a "
    "tower of random weights, as scenes have no captions; the others on single images.",
    "The paper's numbers are for ViT-T with VQ-KD tokens on ADE20K.",
]
