# A third of Fashion-MNIST's training images.
_base_ = "fashion_mnist.py"

unlabelled_scenes = "fashion_mnist_20000_scenes"
tables = ["fashion_mnist_20000", "micro"]

# Changes to a pre-training of another length than the usual, in epochs.
lengths = {
    n: {"train_cfg.max_epochs": n, "param_scheduler.1.end": n} for n in (7, 9, 10, 11, 14, 15, 18, 20, 23)
}

# In bfloat16, which takes half as long on a CPU that multiplies it.
pretrain_amp = "configs/micro/{method}_vit-micro_kclip_1xb32-amp-coslr.py"

# As many epochs as cost what MaPeT's 5 do, within a tenth (the tests count them).
equal = {"MIM": 11, "PIM": 7, "PIM, late": 9, "BEiT": 10, "CAE": 9}
# The rates that the table `rates` has chosen, by objective and epochs: 5, as many as MaPeT's 5 cost, and, at
# the same rate, twice that.
chosen_rates = {
    "MIM": {5: 12e-3, 11: 12e-3, 23: 12e-3},
    "PIM": {5: 12e-3, 7: 24e-3, 14: 24e-3},
    "PIM, late": {5: 24e-3, 9: 24e-3, 18: 24e-3},
    "MaPeT": {5: 48e-3, 10: 48e-3},
    "BEiT": {5: 6e-3, 10: 12e-3, 20: 12e-3},
    "CAE": {5: 3e-3, 9: 3e-3, 18: 3e-3},
}
# Each seed draws CLIP and codebook, too.
pretrained = {
    name: {
        epochs: dict(
            name=f"{name}, {epochs} epochs",
            curve=name,
            method=name.lower().replace(", ", "-"),
            pretrain=pretrain_amp,
            data="fashion_mnist_20000_tokens{seed}",
            options={
                "optim_wrapper.optimizer.lr": rate,
                **({} if epochs == _base_.pretrain_epochs else lengths[epochs]),
            },
        )
        for epochs, rate in own.items()
    }
    for name, own in chosen_rates.items()
}
equal_epochs = [dict(own[_base_.pretrain_epochs], name=name) for name, own in pretrained.items()]
equal_compute = [
    dict(pretrained[name][epochs], name=f"{name}, equal compute") for name, epochs in equal.items()
]
# Frozen features of garments chose MaPeT's rate, 16 times the recipes'. Digits and fine-tuning had no say.
mapet_usual_rate = dict(
    pretrained["MaPeT"][_base_.pretrain_epochs],
    name="MaPeT, 3e-3",
    options={"optim_wrapper.optimizer.lr": 3e-3},
)
own_tokens_alone = dict(_base_.tokens_alone, data="fashion_mnist_20000_tokens{seed}")
equal_compute_note = "Equal compute: as many epochs as cost what MaPeT's 5 do, within a tenth; all others 5."
own_rate_note = (
    "Each objective and each length has its own rate, by the table `rates`; twice as many epochs have the "
    "rate of equal compute. Each seed draws CLIP and codebook, too."
)
usual_rate_note = (
    "MaPeT, 3e-3: at the rate of the recipes, a sixteenth of the chosen one. This row was added after the "
    "others had shown MaPeT behind."
)
last_layer = "accuracy/layer-4"
last_layer_note = (
    "Linear probe: BEiT's protocol, of the last layer. The best one would be chosen on the validation images."
)
every_pooling = [
    dict(name="k-NN, class token", metric="k-NN, class token", **_base_.frozen),
    dict(name="k-NN, patch mean", metric="k-NN, mean", **_base_.frozen),
    *_base_.frozen_columns,
]
