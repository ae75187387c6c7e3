# The paper's comparison with other pre-trainings (tab:comparison), on a small dataset.
_base_ = "../{{$MAPET_MM_DATA:digits}}.py"

title = f"Comparison with BEiT and CAE on {_base_.data_set}, k-CLIP tokens"
rows = [_base_.scratch, _base_.cae, _base_.beit, _base_.mapet]
columns = [
    dict(
        name="fine-tuning, all labels",
        unit="top-1, %",
        config=_base_.finetune,
        recipe="coslr",
        metric="accuracy/top1",
        paper={"no pre-training": 73.7, "CAE": 73.7, "BEiT": 74.8, "MaPeT": 75.5},
    ),
    dict(
        name="linear probe, all labels",
        unit="top-1, %",
        config=_base_.probe,
        metric="accuracy/top1",
        paper={"CAE": 53.9, "BEiT": 61.5, "MaPeT": 62.5},
    ),
]
notes = [
    _base_.probe_note,
    "The paper's numbers are for ViT-T with k-CLIP tokens on ImageNet-1k.",
]
