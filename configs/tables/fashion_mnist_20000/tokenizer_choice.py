# Which tokenizer for one's own images: what its tokens say of them, and what it costs to have them.
_base_ = "../fashion_mnist_20000.py"

title = "Tokenizers on fashion_mnist_20000"
own = dict(tokens="grid", tokenizer="configs/micro/grid.py")
rows = [
    dict(name="k-means of pixels", data="fashion_mnist_20000_round0", **own),
    dict(name="k-means of MaPeT's own features, round 1", data="fashion_mnist_20000_round1", **own),
    dict(name="k-means of MaPeT's own features, round 2", data="fashion_mnist_20000_round2", **own),
    dict(name="DALL-E", tokens="dalle", tokenizer="configs/micro/dalle.py"),
    dict(name="VQ-KD", tokens="vqkd", tokenizer="configs/micro/vqkd.py"),
    dict(name="k-CLIP", tokens="kclip", tokenizer="configs/micro/kclip.py"),
]
mlp = "configs/micro/token-mlp_{tokens}_1xb64-coslr.py"
vit = "configs/micro/token-vit-micro_{tokens}_1xb64-coslr.py"
columns = [
    dict(name="perplexity", unit="tokens", config=mlp, metric="tokens/perplexity"),
    dict(name="dead", unit="tokens", config=mlp, metric="tokens/dead"),
    dict(name="purity", unit="%", config=mlp, metric="tokens/purity"),
    dict(name="MLP on the tokens", unit="top-1, %", config=mlp, metric="accuracy/top1"),
    dict(name="ViT on the tokens", unit="top-1, %", config=vit, metric="accuracy/top1"),
    dict(name="training, codebook, extraction", unit="minutes", config=mlp, metric="tokenizer/minutes"),
]
notes = [
    _base_.tokenizer_note,
    "Perplexity: so many tokens, used evenly, would be as hard to guess. Purity: share of the patches that "
    "are in images of their token's most frequent class; 10 % by chance.",
    "The minutes of a round include all rounds before it.",
]
