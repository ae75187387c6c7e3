# The paper's segmentation table (tab:segmentation), on scenes.
_base_ = "../{{$MAPET_MM_DATA:digits}}.py"

title = f"Semantic segmentation of {_base_.data_set} scenes, k-CLIP tokens"
rows = [_base_.scratch, _base_.mim, _base_.pim, _base_.mapet, _base_.cae, _base_.beit]
columns = [
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
        options={"train_dataloader.dataset.indices": _base_.all_scenes},
    ),
]
notes = ["The paper's numbers are those of ViT-T with VQ-KD tokens on ADE20K."]
