# DINOv2's transfer: classification sets, each a folder with `train` and `val`, by DINOv2's metrics, and their
# mean. Its twelfth set is missing: Pascal VOC 2007 has several classes an image, so no folder per class.
names = (
    *("food101", "cifar10", "cifar100", "sun397", "cars", "aircraft"),
    *("dtd", "pets", "caltech101", "flowers102", "cub200"),
)

evaluation = dict(
    folders={name: f"data/transfer/{name}" for name in names},
    per_class=["aircraft", "pets", "caltech101", "flowers102"],  # their figure is the mean over classes
    protocols=[dict(type="NearestNeighbours"), dict(type="Regression", layers=1, memory=1.0)],
)
