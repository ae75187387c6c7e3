# The paper's tables of objectives (tab:comparison_nlp) and competitors (tab:comparison) and its segmentation
# (tab:segmentation), on a small dataset.
_base_ = "../{{$MAPET_MM_DATA:digits}}.py"

title = f"Pre-training objectives and competitors on {_base_.data_set}, k-CLIP tokens"
rows = [_base_.tokens_alone, _base_.scratch, _base_.mim, _base_.pim, _base_.mapet, _base_.beit, _base_.cae]
baseline = "MaPeT"
linear_probe = dict(
    name="linear probe, all labels",
    unit="top-1, %",
    config=_base_.probe,
    metric="accuracy/top1",
    paper={"MIM": 60.4, "PIM": 59.7, "MaPeT": 62.5, "BEiT": 61.5, "CAE": 53.9},
)
columns = [
    *_base_.frozen_columns,
    linear_probe,
    dict(
        name="fine-tuning, all labels",
        unit="top-1, %",
        config=_base_.finetune,
        recipe="coslr",
        metric="accuracy/top1",
        paper={"no pre-training": 73.7, "MIM": 74.9, "PIM": 75.3, "MaPeT": 75.5, "BEiT": 74.8, "CAE": 73.7},
    ),
    dict(
        name=f"UperNet, {_base_.few_scenes} scenes",
        unit="mIoU, %",
        config=_base_.upernet,
        metric="mIoU",
        paper={"MIM": 39.0, "PIM": 40.2, "MaPeT": 39.3, "BEiT": 39.9, "CAE": 39.2},
    ),
]
notes = [
    _base_.frozen_note,
    _base_.probe_note,
    "The paper's numbers are for ViT-T: on ImageNet-1k with k-CLIP tokens, on ADE20K with VQ-KD tokens.",
]
