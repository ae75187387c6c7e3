# The same images, for one seed of a table: CLIP and codebook have a seed of their own, and not the 0 of the
# runs that chose the learning rates.
_base_ = "fashion_mnist_20000.py"

seed = int("{{$MAPET_MM_SEED:0}}")
data_set = f"fashion_mnist_20000_tokens{seed}"
work_root = f"work_dirs/fashion_mnist_20000_tokens{seed}"
tokenizer_seed = 10 + seed
