# A third of Fashion-MNIST's training images.
_base_ = "fashion_mnist.py"

unlabelled_scenes = "fashion_mnist_20000_scenes"
tables = ["fashion_mnist_20000", "micro"]

# Changes to a pre-training of another length than the usual, in epochs.
lengths = {n: {"train_cfg.max_epochs": n, "param_scheduler.1.end": n} for n in (2, 7, 9, 10, 11, 15, 20, 23)}

# In bfloat16, which takes half as long on a CPU that multiplies it.
pretrain_amp = "configs/micro/{method}_vit-micro_kclip_1xb32-amp-coslr.py"

# As many epochs as cost what MaPeT's 5 do, within a tenth (the tests count them).
equal = {"MIM": 11, "PIM": 7, "PIM, late": 9, "BEiT": 10, "CAE": 9}

# A step costs 294.7 MFLOPs an image with MaPeT, 129.0 with MIM and 147.9 with BEiT (the tests count them).
equal_compute = [
    dict(name="MIM, equal compute", method="mim", pretrain=_base_.pretrain, options=lengths[11]),
    dict(name="BEiT, equal compute", method="beit", pretrain=_base_.pretrain, options=lengths[10]),
]
equal_compute_note = (
    "Equal compute: MaPeT's 5 epochs cost as much arithmetic as 11.4 of MIM's and 10.0 of BEiT's; these rows "
    "have 11 and 10 epochs, all others 5."
)

# For tables with `protocols = 1`, whose records docs/records has.
first_note = (
    "Frozen features, by the first version of the protocols: the 20 nearest neighbours, and logistic "
    "regression on 10 labels a class (mean of five draws), of class token and patch mean, joined as they "
    "are; attentive probe of the patch tokens, its rate one of four, chosen on the validation images; "
    "scenes by their patches' nearest neighbours in 100 labelled ones."
)
