# The paper's tokenizer study (tab:tokenizers): an image's tokens are all that the classifier sees.
_base_ = "../{{$MAPET_MM_DATA:digits}}.py"

title = f"Classification of {_base_.data_set} by their tokens alone"
rows = [
    dict(name="DALL-E", tokens="dalle", tokenizer="configs/micro/dalle.py"),
    dict(name="VQ-KD", tokens="vqkd", tokenizer="configs/micro/vqkd.py"),
    dict(name="k-CLIP", tokens="kclip", tokenizer="configs/micro/kclip.py"),
]
mlp = "configs/micro/token-mlp_{tokens}_1xb64-coslr.py"
vit = "configs/micro/token-vit-micro_{tokens}_1xb64-coslr.py"
columns = [
    dict(
        name="MLP",
        unit="top-1, %",
        config=mlp,
        metric="accuracy/top1",
        paper={"DALL-E": 4.1, "VQ-KD": 68.1, "k-CLIP": 72.8},
    ),
    dict(
        name="MLP",
        unit="top-5, %",
        config=mlp,
        metric="accuracy/top5",
        paper={"DALL-E": 11.7, "VQ-KD": 89.8, "k-CLIP": 93.2},
    ),
    dict(
        name="ViT",
        unit="top-1, %",
        config=vit,
        metric="accuracy/top1",
        paper={"DALL-E": 9.1, "VQ-KD": 72.3, "k-CLIP": 76.2},
    ),
    dict(
        name="ViT",
        unit="top-5, %",
        config=vit,
        metric="accuracy/top5",
        paper={"DALL-E": 21.9, "VQ-KD": 92.2, "k-CLIP": 94.9},
    ),
]
notes = [
    _base_.tokenizer_note,
    "The paper's numbers are for its tokenizers, trained on ImageNet.",
]
