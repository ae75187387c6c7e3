# The data set that the environment variable MAPET_MM_DATA names, a file of data/, and what follows from it.
_base_ = "data/{{$MAPET_MM_DATA:digits}}.py"

assert _base_.img_size % _base_.patch_size == 0, "`img_size` has to be a multiple of `patch_size`"
grid = _base_.img_size // _base_.patch_size
num_patches = grid * grid

codebook_file = f"{_base_.work_root}/codebook.safetensors"
token_stores = dict(
    kclip=f"{_base_.work_root}/tokens",
    vqkd=f"{_base_.work_root}/tokens_vqkd",
    dalle=f"{_base_.work_root}/tokens_dalle",
)
