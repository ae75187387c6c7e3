# What a pre-training gives each of MMSegmentation's decoders for ViTs, on scenes.
_base_ = "../{{$MAPET_MM_DATA:digits}}.py"

title = f"Decoders on {_base_.data_set} scenes, k-CLIP tokens"
unlabelled = _base_.unlabelled_scenes
on_scenes = dict(_base_.mapet, name="MaPeT, unlabelled scenes", data=unlabelled)
rows = [_base_.scratch, _base_.mapet, *([on_scenes] if unlabelled else [])]
segmentation = "configs/micro/vit-micro_{decoder}.py" if _base_.few_scenes else None
column = dict(unit="mIoU, %", config=segmentation, metric="mIoU")
columns = [
    dict(name="linear, frozen", decoder="linear-segmentation_1xb8-coslr", **column),
    dict(name="Segmenter", decoder="segmenter_1xb8-poly", **column),
    dict(name="SETR-PUP", decoder="setr-pup_1xb8-poly", **column),
    dict(name="DPT", decoder="dpt_1xb8-poly", **column),
    dict(name="UperNet", decoder="upernet_1xb8-poly", **column),
]
notes = [f"{_base_.few_scenes} labelled scenes, {_base_.upernet_iterations} iterations of 8 crops."]
