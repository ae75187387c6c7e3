# What tables on the recipes of configs/micro stand on, with the entries of the dataset that is chosen. The
# file of a dataset inherits this and declares its `data` and `runner`.
_base_ = "../../micro/_base_/data.py"

tables = ["micro"]
tokenizer = f"configs/micro/{_base_.tokens}.py"

pretrain = "configs/micro/{method}_vit-micro_kclip_1xb32-coslr.py"
probe_few = "configs/micro/vit-micro_1xb100-linear-coslr_few-labels.py"
probe = "configs/micro/vit-micro_1xb128-linear-coslr.py"
finetune = "configs/micro/vit-micro_1xb64-{recipe}.py"
upernet = "configs/micro/vit-micro_upernet_1xb8-poly.py" if _base_.few_scenes else None
linear_segmentation = (
    "configs/micro/vit-micro_linear-segmentation_1xb8-coslr.py" if _base_.few_scenes else None
)
unlabelled_scenes = None  # the dataset of scenes without labels to pre-train on: there is none

# Of frozen features, at no training's cost: nearest neighbours, few labels, patch tokens, pixels of scenes.
frozen = dict(
    unit="top-1, %", config="configs/evaluation/{features}_frozen.py", features="vit-micro", pooling="both"
)
frozen_columns = [
    dict(name="k-NN", metric="k-NN, {pooling}", **frozen),
    dict(name="10 labels a class", metric="logistic regression, {pooling}, 10 a class", **frozen),
    dict(name="attentive probe", metric="attentive probe, patch tokens, last layer", **frozen),
    dict(
        name="k-NN segmentation",
        metric="k-NN segmentation, patch tokens",
        unit="mIoU, %",
        config=frozen["config"] if _base_.few_scenes else None,
        features="vit-micro",
    ),
]
frozen_note = (
    "Frozen features: the 20 nearest neighbours, and logistic regression on 10 labels a class (mean of five "
    "draws), of class token and patch mean, which k-NN normalises before it joins them; attentive probe of "
    "the patch tokens; scenes by their patches' nearest neighbours in 100 labelled ones. Every tenth "
    "training image chooses rates and regularisation."
)

# From random weights: trained by a recipe of its own; its probes and its segmentation are the control.
scratch = dict(name="no pre-training", recipe="scratch-coslr")
# The targets themselves, by place, as features.
tokens_alone = dict(
    name="tokens alone", features="tokens-micro", pooling="class token", columns=["k-NN", "10 labels a class"]
)
mim = dict(name="MIM", method="mim", pretrain=pretrain)
pim = dict(name="PIM", method="pim", pretrain=pretrain)
mapet = dict(name="MaPeT", method="mapet", pretrain=pretrain)
beit = dict(name="BEiT", method="beit", pretrain=pretrain)
cae = dict(name="CAE", method="cae", pretrain=pretrain)

# A line below each table with a linear probe.
probe_note = (
    "Linear probe: BEiT's protocol, one linear layer behind each layer of the ViT; the figure is that of the "
    "best layer, chosen on the validation images."
)
