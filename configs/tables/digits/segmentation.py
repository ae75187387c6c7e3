# The paper's segmentation table (tab:segmentation), on scenes made of digits.
_base_ = "../_base_/digits.py"

title = "Semantic segmentation of digits scenes, k-CLIP tokens"
rows = [_base_.scratch, _base_.mim, _base_.pim, _base_.mapet, _base_.cae, _base_.beit]
columns = [
    dict(
        name="UperNet, 50 scenes",
        unit="mIoU, %",
        config=_base_.upernet,
        metric="mIoU",
        paper={"MIM": 39.0, "PIM": 40.2, "MaPeT": 39.3, "CAE": 39.2, "BEiT": 39.9},
    ),
    dict(
        name="UperNet, all 400 scenes",
        unit="mIoU, %",
        config=_base_.upernet,
        metric="mIoU",
        options={"train_dataloader.dataset.indices": 400},
    ),
]
notes = ["The paper's numbers are those of ViT-T with VQ-KD tokens on ADE20K."]
