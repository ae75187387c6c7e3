# Cityscapes: segmentation of patch tokens by nearest neighbours.
# The linear head that is trained: configs/segmentation/vit-*_linear_*_cityscapes-512x512.py
evaluation = dict(
    folder="data/cityscapes",
    protocols=[dict(type="SegmentationByNeighbours")],
)
