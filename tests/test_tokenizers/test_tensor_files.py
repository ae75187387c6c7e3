"""Files of tensors that are not what they say are refused in one line, before or after they were opened."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save

from mapet_mm.structures.tensor_files import TensorFile


def test_a_tensor_that_is_not_there_and_a_file_cut_since_are_named(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(save({"rows": np.arange(100)}))
    file = TensorFile(path, ValueError, "remove it")
    with pytest.raises(
        ValueError, match=r"a\.safetensors` is damaged \(it has no tensor `grids`\): remove it"
    ):
        file.rows("grids")
    os.truncate(path, 200)
    with pytest.raises(ValueError, match=r"is damaged \(truncated since it was opened\): remove it"):
        file.rows("rows")


def test_a_header_whose_sizes_differ_is_named(tmp_path):
    header = json.dumps({"rows": dict(dtype="F16", shape=[3], data_offsets=[0, 4])}).encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=r"\(its header: 4 bytes for F16 of shape \(3,\)\): remove it"):
        TensorFile(tmp_path / "a", ValueError, "remove it")
