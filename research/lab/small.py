"""Rows and columns that the tables on small datasets share; their recipes are those of configs/micro."""

from __future__ import annotations

from dataclasses import replace

from lab.tables import Column, Data, Row

KCLIP = "configs/micro/kclip.py"
PRETRAIN = "configs/micro/{method}_vit-micro_kclip_1xb32-coslr.py"
FROZEN = "configs/evaluation/{features}_frozen.py"
PROBE = "configs/micro/vit-micro_1xb128-linear-coslr.py"
PROBE_FEW = "configs/micro/vit-micro_1xb100-linear-coslr_few-labels.py"
FINETUNE = "configs/micro/vit-micro_1xb64-{recipe}.py"
FINETUNE_FEW = "configs/micro/vit-micro_1xb50-coslr_few-labels.py"
UPERNET = "configs/micro/vit-micro_upernet_1xb8-poly.py"
LINEAR_SEGMENTATION = "configs/micro/vit-micro_linear-segmentation_1xb8-coslr.py"
GRID = "configs/micro/grid.py"  # tokens by k-means of a dataset's `grid_encoder`
# In bfloat16, which takes half as long on a CPU that multiplies it.
PRETRAIN_AMP = "research/configs/{method}_vit-micro_kclip_1xb32-amp-coslr.py"
MAE = "research/configs/mae_vit-micro_1xb32-amp-coslr.py"
RATE = "optim_wrapper.optimizer.lr"

DIGITS = Data(
    command=["tools/dataset_converters/digits.py"],
    outputs=["data/digits", "data/digits_inverted", "data/digits_rotated", "data/digits_pixels"],
)

# A third of Fashion-MNIST's training images.
FASHION_MNIST = dict(
    dataset="fashion_mnist_20000",
    tokenizer=KCLIP,
    data=Data(
        command=["research/converters/fashion_mnist.py"],
        outputs=["data/fashion_mnist", "data/fashion_mnist_scenes", "data/fashion_mnist_scenes_unlabelled"],
    ),
)
# Each seed draws its own CLIP and codebook.
OWN_TOKENS = "fashion_mnist_20000_tokens{seed}"

FEATURES = dict(features="vit-micro", pooling="both")
# k-NN and few labels: of class token and patch mean together; attentive probe, segmentation: of patch tokens.
FROZEN_COLUMNS = [
    Column("k-NN", "top-1, %", FROZEN, "k-NN, {pooling}", values=FEATURES),
    Column(
        "10 labels a class", "top-1, %", FROZEN, "logistic regression, {pooling}, 10 a class", values=FEATURES
    ),
    Column(
        "attentive probe", "top-1, %", FROZEN, "attentive probe, patch tokens, last layer", values=FEATURES
    ),
    Column("k-NN segmentation", "mIoU, %", FROZEN, "k-NN segmentation, patch tokens", values=FEATURES),
]
# k-NN of either alone, which two tables show as well.
KNN_COLUMNS = [
    replace(FROZEN_COLUMNS[0], name="k-NN, class token", metric="k-NN, class token"),
    replace(FROZEN_COLUMNS[0], name="k-NN, patch mean", metric="k-NN, mean"),
]
TERAFLOPS = Column("pre-training", "TFLOPs", FROZEN, "pre-training/teraflops", values=FEATURES)
FROZEN_NOTE = (
    "Frozen features: the 20 nearest neighbours, and logistic regression on 10 labels a class (mean of five "
    "draws), of class token and patch mean, which k-NN normalises before it joins them; attentive probe of "
    "the patch tokens; scenes by their patches' nearest neighbours in 100 labelled ones. Every tenth "
    "training image chooses rates and regularisation."
)
PROBE_NOTE = (
    "Linear probe: BEiT's protocol, one linear layer after each layer of the ViT; the figure is that of the "
    "best layer, chosen on the validation images."
)
LAST_LAYER = "accuracy/layer-4"
LAST_LAYER_NOTE = (
    "Linear probe: BEiT's protocol, of the last layer. The best one would be chosen on the validation images."
)
# The paper's numbers for ViT-T: on ImageNet-1k with k-CLIP tokens, on ADE20K with VQ-KD tokens.
LINEAR_PROBE = Column(
    "linear probe, all labels",
    "top-1, %",
    PROBE,
    "accuracy/top1",
    paper={"MIM": 60.4, "PIM": 59.7, "MaPeT": 62.5, "BEiT": 61.5, "CAE": 53.9},
)
FINETUNE_600 = Column("600 labels", "top-1, %", FINETUNE_FEW, "accuracy/top1")
DIGITS_FEW = Column(
    "linear probe, 100 labels", "top-1, %", PROBE_FEW, LAST_LAYER, data="digits", source=DIGITS
)
DIGITS_ALL = Column("linear probe, all labels", "top-1, %", PROBE, LAST_LAYER, data="digits", source=DIGITS)
UPERNET_PAPER = {"MIM": 39.0, "PIM": 40.2, "MaPeT": 39.3, "CAE": 39.2, "BEiT": 39.9}

# From random weights: trained by a recipe of its own; its probes and its segmentation are the control.
SCRATCH = Row("no pre-training", values=dict(recipe="scratch-coslr"))
# The tokens themselves, by place, as features.
TOKENS_ALONE = Row(
    "tokens alone",
    columns=["k-NN", "10 labels a class"],
    values=dict(features="tokens-micro", pooling="class token"),
)
MIM = Row("MIM", PRETRAIN, values=dict(method="mim"))
PIM = Row("PIM", PRETRAIN, values=dict(method="pim"))
MAPET = Row("MaPeT", PRETRAIN, values=dict(method="mapet"))
BEIT = Row("BEiT", PRETRAIN, values=dict(method="beit"))
CAE = Row("CAE", PRETRAIN, values=dict(method="cae"))

USUAL_EPOCHS = 5  # of the tables on photographs


def of_length(epochs: int) -> dict[str, int]:
    """Changes to a pre-training of so many epochs; none for the usual length."""
    if epochs == USUAL_EPOCHS:
        return {}
    return {"train_cfg.max_epochs": epochs, "param_scheduler.1.end": epochs}


def cutting_point_rows(num_patches: int) -> dict[int, Row]:
    """MaPeT at the paper's cutting points, as the same shares of a sequence; 60 of 197 is the recipe's."""
    rows = {}
    for paper in (30, 40, 50, 60, 98):
        ours = round(paper / 197 * (1 + num_patches))
        name = f"c = {ours} ({100 - paper / 1.97:.0f} % targets)"
        options = {} if paper == 60 else {"model.backbone.cutting_point": ours}
        rows[paper] = replace(MAPET, name=name, options=options)
    return rows


CUTTING_POINT_PAPER = {30: 84.2, 40: 84.3, 50: 84.3, 60: 84.4, 98: 84.1}


def segmentation_columns(few: int, many: int) -> list[Column]:
    """A linear layer on frozen tokens, and UperNet, with few and with all labelled scenes."""
    indices = {"train_dataloader.dataset.indices": many}
    return [
        Column(f"frozen, linear, {few} scenes", "mIoU, %", LINEAR_SEGMENTATION, "mIoU"),
        Column(f"frozen, linear, all {many} scenes", "mIoU, %", LINEAR_SEGMENTATION, "mIoU", indices),
        Column(f"UperNet, {few} scenes", "mIoU, %", UPERNET, "mIoU", paper=UPERNET_PAPER),
        Column(f"UperNet, all {many} scenes", "mIoU, %", UPERNET, "mIoU", indices),
    ]
