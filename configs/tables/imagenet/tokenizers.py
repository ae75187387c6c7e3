# The paper's tokenizer study (tab:tokenizers): an image's tokens are all that the classifier sees.
_base_ = "../imagenet.py"

title = "Classification of ImageNet-1k by tokens alone"
rows = [
    dict(name="DALL-E", tokens="dalle", tokenizer=_base_.dalle),
    dict(name="VQ-KD", tokens="vqkd", tokenizer=_base_.vqkd),
    dict(name="k-CLIP", tokens="kclip", tokenizer=_base_.kclip),
]
mlp = "configs/tokens/token-mlp_{tokens}_8xb128-coslr-100e_in1k.py"
vit = "configs/tokens/token-vit-tiny_{tokens}_8xb128-coslr-100e_in1k.py"
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
        name="ViT-T",
        unit="top-1, %",
        config=vit,
        metric="accuracy/top1",
        paper={"DALL-E": 9.1, "VQ-KD": 72.3, "k-CLIP": 76.2},
    ),
    dict(
        name="ViT-T",
        unit="top-5, %",
        config=vit,
        metric="accuracy/top5",
        paper={"DALL-E": 21.9, "VQ-KD": 92.2, "k-CLIP": 94.9},
    ),
]
notes = [
    "The caption of the paper's table adds that CLIP's features classify 73.6 % of the images without "
    "training (zero-shot). It has no row: the paper names neither the encoder nor the prompts.",
]
