"""Error classes under their old names still import, and warn."""

from __future__ import annotations

import warnings

import pytest

from rlx import errors


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("TypeError_", "TypeMismatchError"),
        ("AttributeError_", "OpAttributeError"),
        ("ImportError_", "ModelImportError"),
        ("BufferError_", "BufferUseError"),
    ],
)
def test_an_old_name_is_the_new_class_and_warns(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"^{old} is now {new}$") as seen:
        assert getattr(errors, old) is getattr(errors, new)
    assert seen[0].filename == __file__


def test_import_of_an_old_name_warns() -> None:
    with pytest.warns(DeprecationWarning, match="TypeMismatchError"):
        from rlx.errors import TypeError_
    assert TypeError_ is errors.TypeMismatchError


def test_new_and_unknown_names_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert issubclass(errors.OpAttributeError, errors.TypeMismatchError)
        with pytest.raises(AttributeError, match="has no attribute 'NoSuchError'"):
            _ = errors.NoSuchError
