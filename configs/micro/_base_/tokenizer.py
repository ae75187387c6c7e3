# Images for a tokenizer; the tokenizer's config gives the pipeline and the token store.
_base_ = "data.py"

default_scope = "mmpretrain"
pack = dict(type="PackInputs")
dataloader = dict(num_workers=2)
