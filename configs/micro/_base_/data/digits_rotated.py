# Digits turned by up to 90 degrees: another domain to evaluate what was pre-trained on the digits.
_base_ = "digits.py"

data_set = "digits_rotated"
work_root = "work_dirs/digits_rotated"
data_root = "data/digits_rotated"

train_images = dict(data_root=data_root)
few_images = dict(data_root=data_root)
val_images = dict(data_root=data_root)
