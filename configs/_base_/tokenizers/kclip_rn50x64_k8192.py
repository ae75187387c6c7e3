# k-CLIP as in the paper: CLIP RN50x64 at 448 px, 8192 centroids; CLIP's own mean and deviation, in 0..255.
tokenizer = dict(
    type="mapet_mm.KCLIP",
    clip_model="RN50x64",
    pretrained="openai",
    precision="float16",  # the authors'; on a CPU, "float32" is many times as fast, and makes other tokens
    codebook="work_dirs/tokenizers/kclip_rn50x64-448px_k8192_in1k.safetensors",
)
tokenizer_mean = [122.7709383, 116.7460125, 104.09373615]
tokenizer_std = [68.5005327, 66.6321579, 70.32316305]
tokenizer_square = [
    dict(type="ResizeEdge", scale=448, edge="short", backend="pillow", interpolation="bicubic"),
    dict(type="CenterCrop", crop_size=448),
]
