_base_ = "mapet_vit-base-p16_setr-pup_8xb2-amp-160k_ade20k-512x512.py"

model = dict(
    backbone=dict(arch="deit-small"),
    decode_head=dict(in_channels=384),
    auxiliary_head=[dict(head, in_channels=384) for head in _base_.model.auxiliary_head],
)
