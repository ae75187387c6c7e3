# What the second stream buys: each objective at several lengths, and cheaper forms of MaPeT, over compute.
_base_ = "../fashion_mnist_20000.py"

title = "Quality over compute on fashion_mnist_20000, k-CLIP tokens"
usual = _base_.pretrain_epochs
narrow = {
    "model.backbone.arch.embed_dims": 64,
    "model.backbone.arch.num_heads": 2,
    "model.backbone.arch.feedforward_channels": 256,
}
narrow_features = {name.replace("model.backbone.", "model."): value for name, value in narrow.items()}
# The larger cutting point, 35 of 50 tokens, leaves the query stream less than half of the targets of 15.
kinds = dict(
    MIM=dict(method="mim", epochs=(2, 5, 11, 23)),
    BEiT=dict(method="beit", epochs=(5, 10, 20)),
    CAE=dict(method="cae", epochs=(5,)),
    PIM=dict(method="pim", epochs=(5, 10)),
    MaPeT=dict(method="mapet", epochs=(2, 5, 10)),
)
kinds["MaPeT, c = 35"] = dict(method="mapet", epochs=(5,), options={"model.backbone.cutting_point": 35})
kinds["MaPeT, a third of the predictions"] = dict(
    method="mapet", epochs=(5,), options={"model.prediction_ratio": 0.34}
)
kinds["MaPeT, query stream in the last 2 layers"] = dict(
    method="mapet", epochs=(5,), options={"model.backbone.query_from_layer": 2}
)
kinds["MIM, width 64"] = dict(method="mim", epochs=(5, 11), narrow=True)
kinds["MaPeT, width 64"] = dict(method="mapet", epochs=(5,), narrow=True)
rows = [
    dict(
        name=f"{name}, {epochs} epochs",
        curve=name,
        method=kind["method"],
        pretrain=_base_.pretrain,
        options={
            **kind.get("options", {}),
            **({**narrow, "model.head.embed_dims": 64} if "narrow" in kind else {}),
            # The usual length without a change, so that other tables share its pre-training.
            **({} if epochs == usual else _base_.lengths[epochs]),
        },
        evaluation_options=narrow_features if "narrow" in kind else {},
    )
    for name, kind in kinds.items()
    for epochs in kind["epochs"]
]
cost = dict(name="pre-training", config=_base_.frozen["config"], features=_base_.frozen["features"])
columns = [
    dict(unit="TFLOPs", metric="pre-training/teraflops", **cost),
    dict(unit="minutes", metric="pre-training/minutes", **cost),
    *_base_.frozen_columns,
]
baseline = "MaPeT, 5 epochs"
protocols = 1
notes = [
    _base_.first_note,
    "TFLOPs: the products of the pre-training, forward and backward, counted by PyTorch, the same on every "
    "machine. Minutes: of one thread, alone on its core only if --jobs 1 is given.",
]
