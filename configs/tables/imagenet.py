# ImageNet-1k: what every table on it stands on.
data = dict(folders=["data/imagenet"])
runner = dict(launcher="dist", gpus_per_node=8, cpus_per_process=5)
kclip = "configs/tokenizers/kclip_rn50x64-448px_k8192_in1k.py"
vqkd = "configs/tokenizers/vqkd_beit-base-224px_k8192_in1k.py"
dalle = "configs/tokenizers/dalle_112px_k8192_in1k.py"

pretrain = "configs/{method}/{method}_vit-{size}-p16_{tokens}_{batch}-amp-coslr-300e_in1k.py"
tuned = dict(folder="mapet/benchmarks")
tiny = dict(size="tiny", batch="16xb128", gpus="4xb256", recipe="amp-coslr-300e", **tuned)
small = dict(size="small", batch="32xb64", gpus="4xb256", recipe="amp-coslr-200e", **tuned)
base = dict(size="base", batch="64xb32", gpus="16xb64", recipe="amp-coslr-100e", **tuned)
benchmarks = "configs/mapet/benchmarks/"
finetune = "configs/{folder}/vit-{size}-p16_{gpus}-{recipe}_in1k.py"
probe = benchmarks + "vit-{size}-p16_8xb128-linear-amp-coslr-50e_in1k.py"

# DeiT's recipe in place of fine-tuning's; the paper has no linear probe of it.
scratch = dict(
    name="ViT, no pre-training",
    folder="scratch",
    recipe="scratch-amp-coslr-300e",
    columns=["ViT-T, fine-tuning", "ViT-S, fine-tuning", "ViT-B, fine-tuning"],
)
mim_vqkd = dict(name="MIM, VQ-KD", method="mim", tokens="vqkd", tokenizer=vqkd, pretrain=pretrain)
pim_vqkd = dict(name="PIM, VQ-KD", method="pim", tokens="vqkd", tokenizer=vqkd, pretrain=pretrain)
mapet_vqkd = dict(name="MaPeT, VQ-KD", method="mapet", tokens="vqkd", tokenizer=vqkd, pretrain=pretrain)
beit_vqkd = dict(name="BEiT, VQ-KD", method="beit", tokens="vqkd", tokenizer=vqkd, pretrain=pretrain)
cae_vqkd = dict(name="CAE, VQ-KD", method="cae", tokens="vqkd", tokenizer=vqkd, pretrain=pretrain)
mim_kclip = dict(name="MIM, k-CLIP", method="mim", tokens="kclip", tokenizer=kclip, pretrain=pretrain)
pim_kclip = dict(name="PIM, k-CLIP", method="pim", tokens="kclip", tokenizer=kclip, pretrain=pretrain)
mapet_kclip = dict(name="MaPeT, k-CLIP", method="mapet", tokens="kclip", tokenizer=kclip, pretrain=pretrain)
beit_kclip = dict(name="BEiT, k-CLIP", method="beit", tokens="kclip", tokenizer=kclip, pretrain=pretrain)
cae_kclip = dict(name="CAE, k-CLIP", method="cae", tokens="kclip", tokenizer=kclip, pretrain=pretrain)

# A line below each table with a linear probe.
probe_note = (
    "Linear probe: BEiT's protocol, one linear layer behind each layer of the ViT; the figure is that of the "
    "best layer, chosen on the validation images."
)
