# Pascal VOC 2012: segmentation of patch tokens by nearest neighbours.
# The linear head that is trained: configs/segmentation/vit-*_linear_*_voc12-512x512.py
evaluation = dict(
    folder="data/VOCdevkit",
    protocols=[dict(type="SegmentationByNeighbours")],
)
