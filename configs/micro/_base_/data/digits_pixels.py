# The digits with pixel labels, and a folder of their own for segmentation's runs.
_base_ = "digits.py"

data_set = "digits_pixels"
work_root = "work_dirs/digits_pixels"
