# Frozen evaluation on the embedded digits and, of patch tokens, on 100 scenes (50 to measure on).
load = dict(type="LoadImageFromFile")
digits = dict(type="CustomDataset", data_root="data/digits", pipeline=[load, dict(type="PackInputs")])

scenes = dict(
    type="mmseg.BaseSegDataset",
    data_root="data/digits_scenes",
    img_suffix=".png",
    seg_map_suffix=".png",
    metainfo=dict(classes=("background", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9")),
    pipeline=[load, dict(type="mmseg.LoadAnnotations"), dict(type="mmseg.PackSegInputs")],
)

evaluation = dict(
    train=dict(dataset=dict(data_prefix="train", ann_file="meta/train.txt", **digits)),
    val=dict(dataset=dict(data_prefix="val", ann_file="meta/val.txt", **digits)),
    dense_train=dict(
        dataset=dict(
            data_prefix=dict(img_path="images/training", seg_map_path="annotations/training"),
            indices=100,
            **scenes,
        )
    ),
    dense_val=dict(
        dataset=dict(
            data_prefix=dict(img_path="images/validation", seg_map_path="annotations/validation"),
            indices=50,
            **scenes,
        )
    ),
)
