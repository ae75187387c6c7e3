# What the second stream buys: each objective at several lengths, and cheaper forms of MaPeT, over minutes.
_base_ = "../fashion_mnist_20000.py"

title = "Quality over compute on fashion_mnist_20000, k-CLIP tokens"
methods = dict(MIM="mim", PIM="pim", MaPeT="mapet", BEiT="beit", CAE="cae")
lengths = (2, 5, 10, 20)
usual = _base_.pretrain_epochs
# The larger cutting point, 35 of 50 tokens, leaves the query stream half of what the recipe's 15 leave it.
cheaper = {
    "MaPeT, c = 35": {"model.backbone.cutting_point": 35},
    "MaPeT, a third of the predictions": {"model.prediction_ratio": 0.34},
}
rows = [
    dict(
        name=f"{name}, {epochs} epochs",
        method=methods.get(name, "mapet"),
        pretrain=_base_.pretrain,
        options={
            **cheaper.get(name, {}),
            # The usual length without a change, so that other tables share its pre-training.
            **({} if epochs == usual else {"train_cfg.max_epochs": epochs, "param_scheduler.1.end": epochs}),
        },
    )
    for name in (*methods, *cheaper)
    for epochs in lengths
]
columns = [
    dict(name="pre-training", unit="minutes", config=_base_.probe_few, metric="pre-training/minutes"),
    dict(
        name=f"linear probe, {_base_.few_labels}",
        unit="top-1, %",
        config=_base_.probe_few,
        metric="accuracy/top1",
    ),
    dict(name="linear probe, all labels", unit="top-1, %", config=_base_.probe, metric="accuracy/top1"),
]
notes = [_base_.probe_note, "Minutes are those of one thread, alone on its core only if --jobs 1 is given."]
