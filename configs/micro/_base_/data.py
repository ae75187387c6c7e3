# The dataset that the environment variable MAPET_MM_DATA names, a file of data/, and what follows from it.
_base_ = "data/{{$MAPET_MM_DATA:digits}}.py"

assert _base_.img_size % _base_.patch_size == 0, "`img_size` has to be a multiple of `patch_size`"
grid = _base_.img_size // _base_.patch_size
num_patches = grid * grid

# Checkpoints of networks that are trained for a tokenizer.
vqkd_checkpoint = f"{_base_.work_root}/vqkd/epoch_{_base_.vqkd_epochs}.pth"
dalle_checkpoint = f"{_base_.work_root}/dalle/epoch_{_base_.dalle_epochs}.pth"
clip_checkpoint = f"{_base_.work_root}/clip/epoch_{_base_.clip_epochs}.pth"

codebook_file = f"{_base_.work_root}/codebook.safetensors"
grid_codebook_file = f"{_base_.work_root}/codebook_grid.safetensors"
codebooks = dict(kclip=codebook_file, grid=grid_codebook_file, vqkd=None, dalle=None)
token_stores = dict(
    kclip=f"{_base_.work_root}/tokens",
    vqkd=f"{_base_.work_root}/tokens_vqkd",
    dalle=f"{_base_.work_root}/tokens_dalle",
    grid=f"{_base_.work_root}/tokens_grid",
)
