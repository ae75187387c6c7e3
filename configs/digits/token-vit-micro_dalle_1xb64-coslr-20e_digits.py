_base_ = ["_base_/token-vit-micro.py", "_base_/digits_grids_dalle.py", "_base_/tokens.py"]
