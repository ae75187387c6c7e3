"""The paper's seven tables on ImageNet-1k, with its numbers; GPUs and days."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lab.tables import Column, Data, Literature, Row, Table

ON = dict(dataset="", data=Data(folders=["data/imagenet"]), gpus_per_node=8, cpus_per_process=5)
KCLIP = "configs/tokenizers/kclip_rn50x64-448px_k8192_in1k.py"
VQKD = "configs/tokenizers/vqkd_beit-base-224px_k8192_in1k.py"
DALLE = "configs/tokenizers/dalle_112px_k8192_in1k.py"

PRETRAIN = "configs/{method}/{method}_vit-{size}-p16_{tokens}_{batch}-amp-coslr-300e_in1k.py"
BENCHMARKS = "configs/mapet/benchmarks"
FINETUNE = "configs/{folder}/vit-{size}-p16_{gpus}-{recipe}_in1k.py"
PROBE = BENCHMARKS + "/vit-{size}-p16_8xb128-linear-amp-coslr-50e_in1k.py"
UPERNET = "configs/segmentation/mapet_vit-{size}-p16_upernet_8xb2-amp-160k_ade20k-512x512.py"

TUNED = dict(folder="mapet/benchmarks")
TINY = dict(size="tiny", batch="16xb128", gpus="4xb256", recipe="amp-coslr-300e", **TUNED)
SMALL = dict(size="small", batch="32xb64", gpus="4xb256", recipe="amp-coslr-200e", **TUNED)
BASE = dict(size="base", batch="64xb32", gpus="16xb64", recipe="amp-coslr-100e", **TUNED)


def pretrained(method: str, tokens: str) -> Row:
    """A method on the tokens of a tokenizer, as the paper names them."""
    tokenizer = {"VQ-KD": VQKD, "k-CLIP": KCLIP}[tokens]
    values = dict(method=method.lower(), tokens=tokens.lower().replace("-", ""))
    return Row(f"{method}, {tokens}", PRETRAIN, tokenizer, values=values)


# DeiT's recipe in place of fine-tuning's; the paper has no linear probe of it.
SCRATCH = Row(
    "ViT, no pre-training",
    columns=["ViT-T, fine-tuning", "ViT-S, fine-tuning", "ViT-B, fine-tuning"],
    values=dict(folder="scratch", recipe="scratch-amp-coslr-300e"),
)
PROBE_NOTE = (
    "Linear probe: BEiT's protocol, one linear layer after each layer of the ViT; the figure is that of the "
    "best layer, chosen on the validation images."
)


def column(
    name: str,
    config: str,
    rows: Sequence[Row],
    paper: Sequence[float | None],
    values: Mapping[str, str],
    unit: str = "top-1, %",
    metric: str = "accuracy/top1",
) -> Column:
    """A column with the paper's number of each row, None where the paper has a dash."""
    numbers = {row.name: number for row, number in zip(rows, paper, strict=True) if number is not None}
    return Column(name, unit, config, metric, paper=numbers, values=values)


# tab:comparison_nlp
METHODS = ("MIM", "PIM", "MaPeT")
ROWS = [*(pretrained(one, "VQ-KD") for one in METHODS), *(pretrained(one, "k-CLIP") for one in METHODS)]
OBJECTIVES = Table(
    title="Pre-training objectives on ImageNet-1k",
    rows=ROWS,
    columns=[
        column("ViT-T, fine-tuning", FINETUNE, ROWS, [74.6, 74.9, 74.5, 74.9, 75.3, 75.5], TINY),
        column("ViT-T, linear probe", PROBE, ROWS, [55.3, 56.4, 59.6, 60.4, 59.7, 62.5], TINY),
        column("ViT-S, fine-tuning", FINETUNE, ROWS, [82.0, 82.1, 82.2, 82.0, 81.8, 82.1], SMALL),
        column("ViT-S, linear probe", PROBE, ROWS, [69.9, 68.7, 69.8, 71.1, 69.5, 71.6], SMALL),
        column("ViT-B, fine-tuning", FINETUNE, ROWS, [83.8, 83.7, 84.4, 83.3, 83.3, 83.6], BASE),
        column("ViT-B, linear probe", PROBE, ROWS, [72.3, 73.3, 73.8, 72.3, 73.5, 73.5], BASE),
    ],
    notes=[PROBE_NOTE],
    **ON,
)

# tab:comparison
METHODS = ("CAE", "BEiT", "MaPeT")
ROWS = [*(pretrained(one, "VQ-KD") for one in METHODS), *(pretrained(one, "k-CLIP") for one in METHODS)]
ROWS = [SCRATCH, *ROWS]
COMPARISON = Table(
    title="Comparison with BEiT and CAE on ImageNet-1k",
    rows=ROWS,
    columns=[
        column("ViT-T, fine-tuning", FINETUNE, ROWS, [73.7, 73.4, 75.0, 74.5, 73.7, 74.8, 75.5], TINY),
        column("ViT-T, linear probe", PROBE, ROWS, [None, 52.4, 62.0, 59.6, 53.9, 61.5, 62.5], TINY),
        column("ViT-S, fine-tuning", FINETUNE, ROWS, [79.8, 81.6, 82.2, 82.2, 81.5, 81.9, 82.1], SMALL),
        column("ViT-S, linear probe", PROBE, ROWS, [None, 63.4, 72.6, 69.8, 62.9, 71.1, 71.6], SMALL),
        column("ViT-B, fine-tuning", FINETUNE, ROWS, [81.8, 83.5, 84.4, 84.4, 82.7, 83.3, 83.6], BASE),
        column("ViT-B, linear probe", PROBE, ROWS, [None, 69.4, 75.0, 73.8, 67.6, 73.3, 73.5], BASE),
    ],
    notes=[PROBE_NOTE],
    **ON,
)

# tab:segmentation
ROWS = [pretrained(one, "VQ-KD") for one in ("MIM", "PIM", "MaPeT", "CAE", "BEiT")]
MIOU = dict(unit="mIoU, %", metric="mIoU")
SEGMENTATION = Table(
    title="Semantic segmentation on ADE20K, pre-trained on ImageNet-1k",
    rows=ROWS,
    columns=[
        column("ViT-T", UPERNET, ROWS, [39.0, 40.2, 39.3, 39.2, 39.9], TINY, **MIOU),
        column("ViT-S", UPERNET, ROWS, [45.6, 46.1, 47.0, 45.9, 46.7], SMALL, **MIOU),
        column("ViT-B", UPERNET, ROWS, [49.3, 49.0, 50.4, 50.2, 50.3], BASE, **MIOU),
    ],
    **{**ON, "data": Data(folders=["data/imagenet", "data/ade/ADEChallengeData2016"])},
)

# tab:suppl_new_domains; the paper does not name the model's size: ViT-B here.
ROWS = [pretrained(one, "VQ-KD") for one in ("CAE", "BEiT", "MaPeT")]
ON_OTHERS = BENCHMARKS + "/vit-base-p16_8xb128-linear-amp-coslr-50e_{data}.py"
FOLDERS = ["data/imagenet", "data/stanford_cars", "data/food-101", "data/fgvc-aircraft-2013b"]
TRANSFER = Table(
    title="Linear probe on other datasets, pre-trained on ImageNet-1k",
    rows=ROWS,
    columns=[
        column("Stanford Cars", ON_OTHERS, ROWS, [53.6, 64.5, 68.5], dict(BASE, data="cars")),
        column("Food-101", ON_OTHERS, ROWS, [81.4, 86.9, 86.9], dict(BASE, data="food101")),
        column("FGVC-Aircraft", ON_OTHERS, ROWS, [40.5, 44.9, 46.8], dict(BASE, data="aircraft")),
    ],
    notes=[PROBE_NOTE],
    **{**ON, "data": Data(folders=FOLDERS)},
)

# tab:ablation, ViT-B with VQ-KD tokens; 60 is the recipe's.
ROWS = [
    replace(
        pretrained("MaPeT", "VQ-KD"),
        name=f"c = {c}",
        options={} if c == 60 else {"model.backbone.cutting_point": c},
    )
    for c in (30, 40, 50, 60, 98)
]
CUTTING_POINT = Table(
    title="Cutting point of MaPeT, ViT-B, VQ-KD tokens",
    rows=ROWS,
    columns=[column("ViT-B, fine-tuning", FINETUNE, ROWS, [84.2, 84.3, 84.3, 84.4, 84.1], BASE)],
    **ON,
)

# tab:tokenizers: an image's tokens are all that the classifier sees.
ROWS = [
    Row("DALL-E", tokenizer=DALLE, values=dict(tokens="dalle")),
    Row("VQ-KD", tokenizer=VQKD, values=dict(tokens="vqkd")),
    Row("k-CLIP", tokenizer=KCLIP, values=dict(tokens="kclip")),
]
MLP = "configs/tokens/token-mlp_{tokens}_8xb128-coslr-100e_in1k.py"
VIT = "configs/tokens/token-vit-tiny_{tokens}_8xb128-coslr-100e_in1k.py"
TOP5 = dict(unit="top-5, %", metric="accuracy/top5")
TOKENIZERS = Table(
    title="Classification of ImageNet-1k by its tokens",
    rows=ROWS,
    columns=[
        column("MLP", MLP, ROWS, [4.1, 68.1, 72.8], {}),
        column("MLP", MLP, ROWS, [11.7, 89.8, 93.2], {}, **TOP5),
        column("ViT-T", VIT, ROWS, [9.1, 72.3, 76.2], {}),
        column("ViT-T", VIT, ROWS, [21.9, 92.2, 94.9], {}, **TOP5),
    ],
    notes=[
        "The caption of the paper's table adds that CLIP's features classify 73.6 % of the images without "
        "training (zero-shot). It has no row: the paper names neither the encoder nor the prompts."
    ],
    **ON,
)


def published(name: str, base: float, small: float | None = None) -> Literature:
    """A row of the literature: fine-tuning of ViT-B, and of ViT-S if it was published."""
    numbers = {"ViT-B, fine-tuning": base}
    if small is not None:
        numbers["ViT-S, fine-tuning"] = small
    return Literature(name, numbers)


# tab:sota: the paper takes the rows of the literature from the methods' own papers, with other settings.
MAPET = [pretrained("MaPeT", "k-CLIP"), pretrained("MaPeT", "VQ-KD")]
SOTA = Table(
    title="Comparison with numbers of the literature on ImageNet-1k",
    rows=[
        published("BEiT, 300 epochs", 82.9, small=81.7),
        published("CAE, 300 epochs", 83.6, small=82.0),
        published("SplitMask, 300 epochs", 83.6),
        published("MaskFeat, 300 epochs", 83.6),
        published("PeCo, 300 epochs", 84.1),
        published("MVP, 300 epochs", 84.4),
        published("BEiT v2, 300 epochs", 85.0),
        *MAPET,
        published("BEiT, 800 epochs", 83.2),
        published("CAE, 800 epochs", 83.8),
        published("CAE, 1600 epochs", 83.9),
        published("BEiT v2, 1600 epochs", 85.5),
    ],
    columns=[
        column("ViT-S, fine-tuning", FINETUNE, MAPET, [82.1, 82.2], SMALL),
        column("ViT-B, fine-tuning", FINETUNE, MAPET, [83.6, 84.4], BASE),
    ],
    notes=[
        "Only MaPeT is run, with 300 epochs of pre-training. The paper takes the other numbers from the "
        "methods' own papers, whose settings and epochs differ."
    ],
    **ON,
)

TABLES = dict(
    objectives=OBJECTIVES,
    comparison=COMPARISON,
    segmentation=SEGMENTATION,
    transfer=TRANSFER,
    cutting_point=CUTTING_POINT,
    tokenizers=TOKENIZERS,
    sota=SOTA,
)
