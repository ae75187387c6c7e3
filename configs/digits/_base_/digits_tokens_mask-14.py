# Masks 14 of the 36 patches (39 %) in blocks, as BEiT does. MMPretrain's BEiT and CAE have no validation.
_base_ = "digits_tokens.py"

mask = dict(type="mapet_mm.BlockwiseMask", input_size=6, num_masking_patches=14, min_num_patches=3)

train_dataloader = dict(
    dataset=dict(pipeline=[_base_.load, _base_.color_jitter, _base_.load_tokens, mask, _base_.pack])
)
val_dataloader = val_evaluator = val_cfg = None
test_evaluator = []  # nor a test: the images are for feature extraction
