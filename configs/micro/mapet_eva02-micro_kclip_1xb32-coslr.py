# MMPretrain's EVA-02: rotary positions beside absolute ones, SwiGLU with an inner norm.
_base_ = "mapet_vit-micro_kclip_1xb32-coslr.py"

# SwiGLU has three matrices: two thirds of the width are as many weights.
hidden = _base_.arch.feedforward_channels * 2 // 3
model = dict(
    backbone=dict(type="mapet_mm.MaPeTPretrainEVA02", arch=dict(feedforward_channels=hidden), sub_ln=True)
)
next_config = None  # no recipe fine-tunes it
