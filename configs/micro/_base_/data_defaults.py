# What a dataset of the small recipes may say; a file of data/ inherits this and adds what it has to say.
# Images, loaded, are squares of `img_size`; the ViT cuts them into patches of `patch_size`.
load = [dict(type="LoadImageFromFile")]
patch_size = 4
mean = [127.5, 127.5, 127.5]
std = [63.75, 63.75, 63.75]

# Lengths, in epochs of the images that are trained on.
warmup_epochs = 2
pretrain_epochs = 16
probe_epochs = 20
few_probe_epochs = 200
finetune_epochs = 20
few_finetune_epochs = 120
scratch_epochs = 36  # as many as a pre-training and its fine-tuning have together
token_epochs = 20
clip_epochs = vqkd_epochs = dalle_epochs = 20
upernet_iterations = 500

# Tokenizers: small encoders with fixed random weights, so nothing is downloaded. Trained ones of a dataset:
# `clip_weights = FILE`, and for the two others `dict(init_cfg=dict(type="Pretrained", checkpoint=FILE))`.
tokenizer_note = (
    "All three tokenizers are small and have fixed random weights: nothing was learnt from images but the "
    "codebook of k-CLIP."
)
tokens = "kclip"  # whose tokens pre-trainings predict: a tokenizer's file of configs/micro
vocab_size = 128
# `tokenizer_seed = N` draws another CLIP and another codebook of k-CLIP than 0 does.
clip_resnet = dict(layers=[1, 1, 1, 1], width=8)
clip_stride = 32
clip_weights = dict(type="random", seed=0)
clip_training = None  # instead of those weights: the config that trains this CLIP on the dataset's images
grid_encoder = dict()  # of tokens by k-means of any encoder; empty for the pixels of a patch
grid_training = dict()  # what trains it: `config`, last `checkpoint`, `data`, and the `tokenizer` it reads
class_names = ()  # as captions say them
vqkd = dict(type="VQKD", embed_dims=8, quantize_kmeans_init=False)
vqkd_encoder = dict(embed_dims=48, num_layers=2, num_heads=3, feedforward_channels=96)
dalle = dict(type="DALL-E", n_hid=32, n_blk_per_group=1)
vqkd_training = dalle_training = None  # instead of random weights: the configs that train these two

few_scenes = all_scenes = 0  # scenes with pixel labels to train on: there are none
