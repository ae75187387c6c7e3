# Beyond the paper, whose largest model is ViT-B: its hyper-parameters, for ViT-L.
_base_ = [
    "../_base_/models/mapet_vit-base-p16.py",
    "../_base_/datasets/imagenet_tokens_kclip.py",
    "../_base_/schedules/pretrain_adamw_coslr-300e.py",
    "../_base_/default_runtime.py",
    "../_base_/sharded.py",
]

model = dict(backbone=dict(arch="large", with_cp=True), head=dict(embed_dims=1024))
train_dataloader = dict(batch_size=32)
next_config = None  # no recipe fine-tunes a ViT-L
