# Tokens of windows, for one seed of a table: the codebook has a seed of its own, and not the 0 of the runs
# that chose rates and weights.
_base_ = "fashion_mnist_20000_windows.py"

seed = int("{{$MAPET_MM_SEED:0}}")
data_set = f"fashion_mnist_20000_windows{seed}"
work_root = f"work_dirs/fashion_mnist_20000_windows{seed}"
tokenizer_seed = 10 + seed
