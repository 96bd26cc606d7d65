"""Files that are no ``.npz``: one clear error for each way of being damaged."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from mha_export.errors import InputError
from mha_export.npz import read_npz


def _npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


WHOLE = _npz(x=np.arange(60), y=np.ones((2, 3), np.float32))
FLIPPED = bytearray(WHOLE)
FLIPPED[WHOLE.index(b"NUMPY") + 150] ^= 255


def _npy() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.arange(3))
    return stream.getvalue()


def test_arrays_come_back_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(WHOLE)
    found = read_npz(tmp_path / "x.npz")
    assert sorted(found) == ["x", "y"]
    np.testing.assert_array_equal(found["x"], np.arange(60))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", "not an .npz", id="empty"),
        pytest.param(b"no", "not an .npz", id="text"),
        pytest.param(WHOLE[:300], "not an .npz", id="cut"),
        pytest.param(bytes(FLIPPED), "not an .npz", id="flipped"),
        pytest.param(_npy(), "one array without a name", id="npy"),
        pytest.param(_npz(x=np.array([{}], object)), "not an .npz", id="pickled"),
        pytest.param(None, "no such file", id="absent"),
    ],
)
def test_a_damaged_file_is_one_clear_error(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_npz(path)
    assert words in caught.value.what
    assert str(path) in caught.value.what
    assert caught.value.fix
