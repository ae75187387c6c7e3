# Fine-tuning at 1 % and 10 % of the labels of the 60,000 images, and at all labels of the 20,000 images.
_base_ = "../fashion_mnist_20000.py"

title = "Fine-tuning on fashion_mnist_20000, k-CLIP tokens"
few = "configs/micro/vit-micro_1xb50-coslr_few-labels.py"
ann_file = "train_dataloader.dataset.ann_file"
rows = [_base_.scratch, *_base_.equal_epochs, _base_.mapet_usual_rate, *_base_.equal_compute]
columns = [
    dict(name="600 labels", unit="top-1, %", config=few, metric="accuracy/top1"),
    dict(
        name="6,000 labels",
        unit="top-1, %",
        config=_base_.finetune,
        recipe="coslr",
        options={ann_file: "meta/train_6000.txt"},
        metric="accuracy/top1",
    ),
    dict(
        name="20,000 labels",
        unit="top-1, %",
        config=_base_.finetune,
        recipe="coslr",
        metric="accuracy/top1",
    ),
]
baseline = "MaPeT"
notes = [
    "No pre-training: with 600 labels the recipe of fine-tuning, from random weights.",
    _base_.equal_compute_note,
    _base_.own_rate_note,
    _base_.usual_rate_note,
]
