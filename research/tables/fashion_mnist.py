"""Tables on a third of Fashion-MNIST's training images: some hours each on two CPU cores."""

from dataclasses import replace

from lab import small
from lab.tables import Column, Row, Table

ON = small.FASHION_MNIST

# The learning rate of each objective at each length in epochs, chosen by frozen features of 5,000 training
# images that no table measures (research/results/learning_rates.md): for 5 epochs, for as many as cost what
# MaPeT's 5 do within a tenth, and, at the same rate, for twice that.
CHOSEN_RATES = {
    "MIM": {5: 12e-3, 11: 12e-3, 23: 12e-3},
    "PIM": {5: 12e-3, 7: 24e-3, 14: 24e-3},
    "PIM, late": {5: 24e-3, 9: 24e-3, 18: 24e-3},
    "MaPeT": {5: 48e-3, 10: 48e-3},
    "BEiT": {5: 6e-3, 10: 12e-3, 20: 12e-3},
    "CAE": {5: 3e-3, 9: 3e-3, 18: 3e-3},
}
EQUAL_COMPUTE = {"MIM": 11, "PIM": 7, "PIM, late": 9, "BEiT": 10, "CAE": 9}


def pretrained(name: str, epochs: int, shown: str) -> Row:
    """A pre-training at its chosen learning rate."""
    return Row(
        shown,
        small.PRETRAIN_AMP,
        options={small.RATE: CHOSEN_RATES[name][epochs], **small.of_length(epochs)},
        curve=name,
        data=small.OWN_TOKENS,
        values=dict(method=name.lower().replace(", ", "-")),
    )


EQUAL_EPOCHS_ROWS = [pretrained(name, small.USUAL_EPOCHS, name) for name in CHOSEN_RATES]
EQUAL_COMPUTE_ROWS = [
    pretrained(name, epochs, f"{name}, equal compute") for name, epochs in EQUAL_COMPUTE.items()
]
# Frozen features chose MaPeT's rate, 16 times the recipes'. Digits and fine-tuning had no say.
MAPET_USUAL_RATE = replace(pretrained("MaPeT", small.USUAL_EPOCHS, "MaPeT, 3e-3"), options={small.RATE: 3e-3})
TOKENS_ALONE = replace(small.TOKENS_ALONE, data=small.OWN_TOKENS)

FROZEN_COLUMNS = [*small.KNN_COLUMNS, *small.FROZEN_COLUMNS]

EQUAL_COMPUTE_NOTE = "Equal compute: as many epochs as cost what MaPeT's 5 do, within a tenth; all others 5."
RATE_NOTE = (
    "Each objective has the learning rate that was chosen for it and its length; twice as many epochs have "
    "the rate of equal compute. Each seed draws its own CLIP and codebook."
)
USUAL_RATE_NOTE = (
    "MaPeT, 3e-3: at the rate of the recipes, a sixteenth of the chosen one. This row was added after the "
    "others had shown MaPeT behind."
)
PAPER_NOTE = (
    "The paper's numbers are for ViT-T: on ImageNet-1k with k-CLIP tokens, on ADE20K with VQ-KD tokens."
)

OBJECTIVES = Table(
    title="Pre-training objectives and competitors on Fashion-MNIST, k-CLIP tokens",
    rows=[TOKENS_ALONE, small.SCRATCH, *EQUAL_EPOCHS_ROWS, *EQUAL_COMPUTE_ROWS],
    columns=[*FROZEN_COLUMNS, replace(small.LINEAR_PROBE, metric=small.LAST_LAYER)],
    baseline="MaPeT",
    notes=[small.FROZEN_NOTE, small.LAST_LAYER_NOTE, PAPER_NOTE, EQUAL_COMPUTE_NOTE, RATE_NOTE],
    **ON,
)

# At 1 % and 10 % of the labels of the 60,000 images, and at all labels of the 20,000 images.
FINE_TUNING = Table(
    title="Fine-tuning on Fashion-MNIST, k-CLIP tokens",
    rows=[small.SCRATCH, *EQUAL_EPOCHS_ROWS, MAPET_USUAL_RATE, *EQUAL_COMPUTE_ROWS],
    columns=[
        small.FINETUNE_600,
        Column(
            "6,000 labels",
            "top-1, %",
            small.FINETUNE,
            "accuracy/top1",
            {"train_dataloader.dataset.ann_file": "meta/train_6000.txt"},
            values=dict(recipe="coslr"),
        ),
        Column("20,000 labels", "top-1, %", small.FINETUNE, "accuracy/top1", values=dict(recipe="coslr")),
    ],
    baseline="MaPeT",
    notes=[
        "No pre-training: with 600 labels the recipe of fine-tuning, from random weights.",
        EQUAL_COMPUTE_NOTE,
        RATE_NOTE,
        USUAL_RATE_NOTE,
    ],
    **ON,
)

# The paper's cross-domain transfer (tab:suppl_new_domains), to handwritten digits. Their grid of patches is
# smaller, 6 x 6 instead of 7 x 7, so position embeddings are resized.
TRANSFER = Table(
    title="Linear probe on digits, pre-trained on Fashion-MNIST",
    rows=[small.SCRATCH, *EQUAL_EPOCHS_ROWS, MAPET_USUAL_RATE, *EQUAL_COMPUTE_ROWS],
    columns=[small.DIGITS_FEW, small.DIGITS_ALL],
    baseline="MaPeT",
    notes=[small.LAST_LAYER_NOTE, EQUAL_COMPUTE_NOTE, RATE_NOTE, USUAL_RATE_NOTE],
    **ON,
)

COMPUTE = Table(
    title="Quality over compute on Fashion-MNIST, k-CLIP tokens",
    rows=[
        pretrained(name, epochs, f"{name}, {epochs} epochs")
        for name, rates in CHOSEN_RATES.items()
        for epochs in rates
    ],
    columns=[small.TERAFLOPS, *FROZEN_COLUMNS],
    baseline="MaPeT, 5 epochs",
    notes=[
        small.FROZEN_NOTE,
        "TFLOPs: the products of the pre-training, forward and backward, counted by PyTorch.",
        RATE_NOTE,
    ],
    **ON,
)

# The paper's ablation of the cutting point (tab:ablation), at the recipes' rate, which favours no value.
CUTTING_POINT = Table(
    title="Cutting point of MaPeT on Fashion-MNIST",
    rows=[
        replace(MAPET_USUAL_RATE, name=row.name, options={**row.options, **MAPET_USUAL_RATE.options})
        for row in small.cutting_point_rows(num_patches=49).values()
    ],
    columns=FROZEN_COLUMNS,
    baseline="c = 15 (70 % targets)",
    notes=[small.FROZEN_NOTE, "All at the recipes' rate, 3e-3. Each seed draws its own CLIP and codebook."],
    **ON,
)

ON_IMAGES = [small.MIM, small.PIM, small.MAPET, small.CAE, small.BEIT]
ON_SCENES = [
    replace(row, name=f"{row.name}, unlabelled scenes", data="fashion_mnist_20000_scenes")
    for row in (small.MIM, small.MAPET)
]
SEGMENTATION = Table(
    title="Semantic segmentation of Fashion-MNIST scenes, k-CLIP tokens",
    rows=[small.SCRATCH, *ON_IMAGES, *ON_SCENES],
    columns=small.segmentation_columns(200, 2000),
    notes=[
        "Unlabelled scenes: pre-trained on other scenes than the labelled ones, with tokens of their own, by "
        "a tower of random weights, as scenes have no captions; the others on single images.",
        "The paper's numbers are for ViT-T with VQ-KD tokens on ADE20K.",
    ],
    **ON,
)

MLP = "configs/micro/token-mlp_{tokens}_1xb64-coslr.py"
VIT = "configs/micro/token-vit-micro_{tokens}_1xb64-coslr.py"


def by_k_means(name: str, generation: int) -> Row:
    """Tokens by k-means: of pixels, or of the features of a MaPeT on the generation before."""
    data = f"fashion_mnist_20000_bootstrap{generation}"
    return Row(name, tokenizer=small.GRID, data=data, values=dict(tokens="grid"))


# Which tokenizer for one's own images: what its tokens say of them, and what it costs to have them.
TOKENIZERS = Table(
    title="Tokenizers on Fashion-MNIST",
    rows=[
        by_k_means("k-means of pixels", 0),
        by_k_means("k-means of MaPeT's features, generation 1", 1),
        by_k_means("k-means of MaPeT's features, generation 2", 2),
        Row("DALL-E", tokenizer="configs/micro/dalle.py", values=dict(tokens="dalle")),
        Row("VQ-KD", tokenizer="configs/micro/vqkd.py", values=dict(tokens="vqkd")),
        Row("k-CLIP", tokenizer="configs/micro/kclip.py", values=dict(tokens="kclip")),
    ],
    columns=[
        Column("perplexity", "tokens", MLP, "tokens/perplexity"),
        Column("dead", "tokens", MLP, "tokens/dead"),
        Column("purity", "%", MLP, "tokens/purity"),
        Column("MLP on the tokens", "top-1, %", MLP, "accuracy/top1"),
        Column("ViT on the tokens", "top-1, %", VIT, "accuracy/top1"),
        Column("training, codebook, extraction", "minutes", MLP, "tokenizer/minutes"),
    ],
    notes=[
        "All were trained on the training images: k-CLIP's tower on captions that name their classes, VQ-KD "
        "on that tower's features, DALL-E's encoder on the pixels.",
        "Perplexity: so many tokens, used evenly, would be as hard to guess. Purity: share of the patches "
        "that are in images of their token's most frequent class; 10 % by chance.",
        "The minutes of a generation include all before it.",
    ],
    **ON,
)


def bootstrapped(
    name: str, generation: int, epochs: int = small.USUAL_EPOCHS, start: str | None = None
) -> Row:
    """MaPeT on the tokens of a generation."""
    data = f"fashion_mnist_20000_bootstrap{generation}"
    return replace(
        small.MAPET, name=name, tokenizer=small.GRID, data=data, options=small.of_length(epochs), start=start
    )


CONTINUED = "generation 1, continued from generation 0, 5 + 5 epochs"
# MaPeT on tokens of pixels, and on those of the generations before, at the same number of epochs in all.
BOOTSTRAP = Table(
    title="Bootstrapped tokens on Fashion-MNIST, MaPeT",
    rows=[
        bootstrapped("generation 0, 5 epochs", 0),
        bootstrapped("generation 1, 5 epochs", 1),
        bootstrapped("generation 2, 5 epochs", 2),
        bootstrapped("generation 0, 10 epochs", 0, 10),
        bootstrapped(CONTINUED, 1, start="generation 0, 5 epochs"),
        bootstrapped("generation 0, 15 epochs", 0, 15),
        bootstrapped("generation 2, continued from generation 1, 5 + 5 + 5 epochs", 2, start=CONTINUED),
        small.MAPET,
    ],
    columns=small.FROZEN_COLUMNS,
    baseline="generation 0, 10 epochs",
    notes=[
        small.FROZEN_NOTE,
        "Generation 0: k-means of pixels. Generations 1 and 2: k-means of the features of a MaPeT that was "
        "pre-trained for 5 epochs on the tokens of the generation before: with these, generation 1 costs 10 "
        "epochs and generation 2 costs 15, as many as the rows of generation 0 that train longer.",
        "Continued: the backbone starts from the weights of the row that is named, the head afresh.",
        "MaPeT, the last row, has 5 epochs on tokens of k-CLIP, whose tower was trained on captions.",
    ],
    **ON,
)

TABLES = dict(
    objectives=OBJECTIVES,
    fine_tuning=FINE_TUNING,
    transfer=TRANSFER,
    compute=COMPUTE,
    cutting_point=CUTTING_POINT,
    segmentation=SEGMENTATION,
    tokenizers=TOKENIZERS,
    bootstrap=BOOTSTRAP,
)
