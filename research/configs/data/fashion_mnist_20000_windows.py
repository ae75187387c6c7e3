# Tokens by k-means of the pixels of a window around each patch, which know neither captions nor labels.
_base_ = "fashion_mnist_20000.py"

data_set = "fashion_mnist_20000_windows"
work_root = "work_dirs/fashion_mnist_20000_windows"
tokens = "grid"
custom_imports = dict(imports=["lab.windows"])
grid_encoder = dict(type="mapet_mm.WindowPixels", window_size=10, patch_size=4)
