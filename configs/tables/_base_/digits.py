# The embedded digits: what every table on them stands on.
data = dict(
    command=["tools/dataset_converters/digits.py"],
    outputs=["data/digits", "data/digits_scenes"],
)
tokenizer = "configs/digits/kclip_digits.py"

probe_100 = "configs/digits/vit-micro-p4_1xb100-linear-coslr-200e_digits-100.py"
probe = "configs/digits/vit-micro-p4_1xb128-linear-coslr-20e_digits.py"
finetune = "configs/digits/vit-micro-p4_1xb64-coslr-20e_digits.py"
upernet = "configs/digits/vit-micro-p4_upernet_1xb8-500i_digits-scenes-50-48x48.py"
pretrain = "configs/digits/{method}_vit-micro-p4_kclip_1xb32-coslr-16e_digits.py"
