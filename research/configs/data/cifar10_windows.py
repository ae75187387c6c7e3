# Tokens by k-means of the pixels of a window around each patch, which know nothing else.
_base_ = "cifar10_held_out.py"

data_set = "cifar10_windows"
work_root = "work_dirs/cifar10_windows"
custom_imports = dict(imports=["lab.windows"])
grid_encoder = dict(_delete_=True, type="mapet_mm.WindowPixels", window_size=10, patch_size=4)
