"""Images with pixel labels, as MMSegmentation's pipelines hand them to a model."""

import torch
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample


def random_batch(count: int, height: int, width: int, classes: int) -> dict[str, list]:
    """A batch of images `(3, height, width)` and their samples, all random."""
    shape = (height, width)
    sizes = dict(ori_shape=shape, img_shape=shape, pad_shape=shape)
    labels = [PixelData(data=torch.randint(classes, (1, *shape))) for _ in range(count)]
    return dict(
        inputs=list(torch.randint(256, (count, 3, *shape), dtype=torch.uint8)),
        data_samples=[SegDataSample(gt_sem_seg=label, metainfo=sizes) for label in labels],
    )
