# CamVid's streets, as research/converters/camvid.py writes them, without one recording, which is measured:
# that of a table's seed. Without image labels.
_base_ = "cifar10_held_out.py"

recording = ("0001TP", "0006R0", "0016E5")[int("{{$MAPET_MM_SEED:0}}")]
data_set = f"camvid_without_{recording}"
few_scenes, all_scenes = 900, 900  # the smallest list has 978
scene_crop = 64
scene_classes = (
    *("sky", "building", "pole", "road", "pavement", "tree"),
    *("sign", "fence", "car", "pedestrian", "bicyclist"),
)
scene_class_weights = [1.0] * 11
upernet_iterations = 1000
scenes = dict(
    type="BaseSegDataset",
    data_root="data/camvid_64",
    data_prefix=dict(img_path="images", seg_map_path="annotations"),
    img_suffix=".png",
    seg_map_suffix=".png",
    metainfo=dict(classes=scene_classes),
)
train_scenes = dict(ann_file=f"meta/without_{recording}.txt", **scenes)
val_scenes = dict(ann_file=f"meta/{recording}.txt", **scenes)
