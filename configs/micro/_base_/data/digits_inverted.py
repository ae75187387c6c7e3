# Digits in dark ink on light ground: another domain to evaluate what was pre-trained on the digits.
_base_ = "digits.py"

data_set = "digits_inverted"
work_root = "work_dirs/digits_inverted"
data_root = "data/digits_inverted"

train_images = dict(data_root=data_root)
few_images = dict(data_root=data_root)
val_images = dict(data_root=data_root)
