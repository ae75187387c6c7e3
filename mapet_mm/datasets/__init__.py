"""Images of folders, stored ones and those in tar files, and transforms of images with token grids."""

import mapet_mm.registry  # first: it imports MMPretrain's data sets without their debug line
from mapet_mm.datasets.image_folder import ImageFolder
from mapet_mm.datasets.stored_images import StoredImages, whole_batch
from mapet_mm.datasets.tar_shards import LoadImageFromTar, TarShards
from mapet_mm.datasets.transforms.center_crop import CenterCrop
from mapet_mm.datasets.transforms.color_jitter import ColorJitter
from mapet_mm.datasets.transforms.labels import MapLabels
from mapet_mm.datasets.transforms.load_picture import EachBand, LoadPicture
from mapet_mm.datasets.transforms.masking import BlockwiseMask
from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid, RandomCropTokenGrid, RandomFlipTokenGrid
