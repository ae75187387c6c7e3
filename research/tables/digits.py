"""Tables on the embedded digits: a few hours each on two CPU cores."""

from dataclasses import replace

from lab import small
from lab.tables import Column, Data, Row, Table

ON = dict(
    dataset="digits_with_scenes",
    tokenizer=small.KCLIP,
    data=Data(
        command=["research/converters/digits_scenes.py"],
        outputs=["data/digits", "data/digits_scenes", "data/digits_scenes_unlabelled"],
    ),
)

FINE_TUNING = Column(
    "fine-tuning, all labels",
    "top-1, %",
    small.FINETUNE,
    "accuracy/top1",
    paper={"no pre-training": 73.7, "MIM": 74.9, "PIM": 75.3, "MaPeT": 75.5, "BEiT": 74.8, "CAE": 73.7},
    values=dict(recipe="coslr"),
)
UPERNET = Column("UperNet, 50 scenes", "mIoU, %", small.UPERNET, "mIoU", paper=small.UPERNET_PAPER)

# The paper's tables of objectives (tab:comparison_nlp) and competitors (tab:comparison) in one.
OBJECTIVES = Table(
    title="Pre-training objectives and competitors on digits, k-CLIP tokens",
    rows=[small.TOKENS_ALONE, small.SCRATCH, small.MIM, small.PIM, small.MAPET, small.BEIT, small.CAE],
    columns=[*small.FROZEN_COLUMNS, small.LINEAR_PROBE, FINE_TUNING, UPERNET],
    baseline="MaPeT",
    notes=[
        small.FROZEN_NOTE,
        small.PROBE_NOTE,
        "The paper's numbers are for ViT-T: on ImageNet-1k with k-CLIP tokens, on ADE20K with VQ-KD tokens.",
    ],
    **ON,
)

ON_DIGITS = [small.MIM, small.PIM, small.MAPET, small.CAE, small.BEIT]
ON_SCENES = [
    replace(row, name=f"{row.name}, unlabelled scenes", data="digits_unlabelled_scenes") for row in ON_DIGITS
]
# The paper's segmentation (tab:segmentation).
SEGMENTATION = Table(
    title="Semantic segmentation of scenes of digits, k-CLIP tokens",
    rows=[small.SCRATCH, *ON_DIGITS, *ON_SCENES],
    columns=small.segmentation_columns(50, 400),
    notes=[
        "Unlabelled scenes: pre-trained on other scenes than the labelled ones, with tokens of their own; "
        "the others on single digits.",
        "The paper's numbers are for ViT-T with VQ-KD tokens on ADE20K.",
    ],
    **ON,
)

CUTTING_POINTS = small.cutting_point_rows(num_patches=36)
CUTTING_POINTS_PAPER = {row.name: small.CUTTING_POINT_PAPER[c] for c, row in CUTTING_POINTS.items()}
# The paper's ablation of the cutting point (tab:ablation).
CUTTING_POINT = Table(
    title="Cutting point of MaPeT on digits",
    rows=list(CUTTING_POINTS.values()),
    columns=[
        *small.FROZEN_COLUMNS,
        replace(small.LINEAR_PROBE, paper={}),
        replace(FINE_TUNING, paper=CUTTING_POINTS_PAPER),
    ],
    notes=[
        small.FROZEN_NOTE,
        small.PROBE_NOTE,
        "The paper's numbers are for ViT-B with VQ-KD tokens and c = 30, 40, 50, 60, 98 of 197.",
    ],
    **ON,
)

MLP = "configs/micro/token-mlp_{tokens}_1xb64-coslr.py"
VIT = "configs/micro/token-vit-micro_{tokens}_1xb64-coslr.py"
# The paper's tokenizer study (tab:tokenizers): an image's tokens are all that the classifier sees.
TOKENIZERS = Table(
    title="Classification of digits by their tokens",
    rows=[
        Row("DALL-E", tokenizer="configs/micro/dalle.py", values=dict(tokens="dalle")),
        Row("VQ-KD", tokenizer="configs/micro/vqkd.py", values=dict(tokens="vqkd")),
        Row("k-CLIP", tokenizer="configs/micro/kclip.py", values=dict(tokens="kclip")),
    ],
    columns=[
        Column("MLP", "top-1, %", MLP, "accuracy/top1", paper={"DALL-E": 4.1, "VQ-KD": 68.1, "k-CLIP": 72.8}),
        Column(
            "MLP", "top-5, %", MLP, "accuracy/top5", paper={"DALL-E": 11.7, "VQ-KD": 89.8, "k-CLIP": 93.2}
        ),
        Column("ViT", "top-1, %", VIT, "accuracy/top1", paper={"DALL-E": 9.1, "VQ-KD": 72.3, "k-CLIP": 76.2}),
        Column(
            "ViT", "top-5, %", VIT, "accuracy/top5", paper={"DALL-E": 21.9, "VQ-KD": 92.2, "k-CLIP": 94.9}
        ),
    ],
    notes=[
        "All three tokenizers are small and have fixed random weights: nothing was learnt from images but "
        "the codebook of k-CLIP.",
        "The paper's numbers are for its tokenizers, trained on ImageNet.",
    ],
    **ON,
)

# The paper's cross-domain transfer (tab:suppl_new_domains), from digits to two other domains of digits.
TRANSFER = Table(
    title="Linear probe on other domains, pre-trained on digits",
    rows=[small.SCRATCH, small.CAE, small.BEIT, small.MAPET],
    columns=[
        Column("inverted digits", "top-1, %", small.PROBE, "accuracy/top1", data="digits_inverted"),
        Column("rotated digits", "top-1, %", small.PROBE, "accuracy/top1", data="digits_rotated"),
    ],
    notes=[
        small.PROBE_NOTE,
        "The paper's domains are Stanford Cars, Food-101 and FGVC-Aircraft: CAE 53.6, 81.4, 40.5; BEiT 64.5, "
        "86.9, 44.9; MaPeT 68.5, 86.9, 46.8 (paper).",
    ],
    **ON,
)

TABLES = dict(
    objectives=OBJECTIVES,
    segmentation=SEGMENTATION,
    cutting_point=CUTTING_POINT,
    tokenizers=TOKENIZERS,
    transfer=TRANSFER,
)
