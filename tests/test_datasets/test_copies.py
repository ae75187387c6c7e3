"""Copies of a file are found by their content, whatever their names."""

from mapet_mm.datasets.copies import PART, first_copies


def test_each_file_knows_the_first_of_its_copies(tmp_path):
    large = bytes(3 * PART)
    contents = [b"a", b"b", b"a", large, b"", b"", b"x" + large[1:], large, b"b", b"a"]
    for index, content in enumerate(contents):
        (tmp_path / str(index)).write_bytes(content)
    paths = [str(tmp_path / str(index)) for index in range(len(contents) + 1)]  # the last is not there
    assert first_copies(paths) == [0, 1, 0, 3, 4, 5, 6, 3, 1, 0, 10]
    assert first_copies([]) == []
