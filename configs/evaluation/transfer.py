# The twelve classification sets of DINOv2's transfer, each a folder with `train` and `val`, and their mean.
# Images of Pascal VOC 2007 have several classes; in folders each has one.
names = (
    *("food101", "cifar10", "cifar100", "sun397", "cars", "aircraft"),
    *("voc2007", "dtd", "pets", "caltech101", "flowers102", "cub200"),
)

evaluation = dict(
    folders={name: f"data/transfer/{name}" for name in names},
    protocols=[dict(type="NearestNeighbours"), dict(type="LinearProbes", layers=1)],
)
