"""Pictures that are no photographs, in files."""

from pathlib import Path

import numpy as np
import pytest


def dicom(path: Path, values: np.ndarray, **tags) -> Path:
    """A DICOM file of one picture, or of frames."""
    pydicom = pytest.importorskip("pydicom")
    from pydicom.uid import ExplicitVRLittleEndian

    dataset = pydicom.Dataset()
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.SOPClassUID = "1.2.840.10008.5.1.4.1.1.2"
    dataset.SOPInstanceUID = "1.2.3"
    dataset.Rows, dataset.Columns = values.shape[-2:]
    if values.ndim == 3:
        dataset.NumberOfFrames = len(values)
    dataset.SamplesPerPixel = 1
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.BitsAllocated = 16
    dataset.BitsStored = 16
    dataset.HighBit = 15
    dataset.PixelRepresentation = int(values.dtype == np.int16)
    for name, value in tags.items():
        setattr(dataset, name, value)
    dataset.PixelData = values.tobytes()
    dataset.save_as(path, enforce_file_format=True)
    return path
