# The embedded digits: what every table on them stands on.
data = dict(
    command=["tools/dataset_converters/digits.py"],
    outputs=["data/digits", "data/digits_inverted", "data/digits_rotated", "data/digits_scenes"],
)
runner = dict(launcher="local", cpus_per_process=1)
tokenizer = "configs/digits/kclip_digits.py"

pretrain = "configs/digits/{method}_vit-micro-p4_kclip_1xb32-coslr-16e_digits.py"
probe_100 = "configs/digits/vit-micro-p4_1xb100-linear-coslr-200e_digits-100.py"
probe = "configs/digits/vit-micro-p4_1xb128-linear-coslr-20e_digits.py"
finetune = "configs/digits/vit-micro-p4_1xb64-{recipe}_digits.py"
upernet = "configs/digits/vit-micro-p4_upernet_1xb8-500i_digits-scenes-50-48x48.py"

# From random weights: trained by a recipe of its own; its probes and its segmentation are the control.
scratch = dict(name="no pre-training", recipe="scratch-coslr-36e")
mim = dict(name="MIM", method="mim", pretrain=pretrain)
pim = dict(name="PIM", method="pim", pretrain=pretrain)
mapet = dict(name="MaPeT", method="mapet", pretrain=pretrain)
beit = dict(name="BEiT", method="beit", pretrain=pretrain)
cae = dict(name="CAE", method="cae", pretrain=pretrain)

# A line below each table with a linear probe.
probe_note = (
    "Linear probe: BEiT's protocol, one linear layer behind each layer of the ViT; the figure is that of the "
    "best layer, chosen on the validation images."
)
