_base_ = "mapet_vit-micro_kclip_1xb32-coslr.py"

# As large a share of the patches as on ImageNet (75 of 196, 38 %) is masked at random.
num_masked = round(75 / 196 * _base_.num_patches)
model = dict(backbone=dict(objective="mim", cutting_point=1 + _base_.num_patches - num_masked))
