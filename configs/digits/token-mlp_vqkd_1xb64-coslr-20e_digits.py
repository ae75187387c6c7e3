_base_ = ["_base_/token-mlp.py", "_base_/digits_grids_vqkd.py", "_base_/tokens.py"]
