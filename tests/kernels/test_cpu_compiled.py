"""Where compiled kernels are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.cpu import compiled


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The user's cache, and the folder for temporary files."""
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return cache, temporary


def test_the_users_cache_is_taken_again(places: tuple[Path, Path]) -> None:
    folder = compiled._folder()
    assert places[0] in folder.parents and folder == compiled._folder()
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_cannot_be_made_is_replaced(places: tuple[Path, Path]) -> None:
    places[0].write_text("not a folder")
    folder = compiled._folder()
    assert places[1] in folder.parents and folder == compiled._folder()


@pytest.mark.parametrize("level", [0, 1])
def test_a_folder_that_others_may_write_to_is_not_used(places: tuple[Path, Path], level: int) -> None:
    shared = [compiled._folder(), compiled._folder().parent][level]
    shared.chmod(0o777)
    assert shared not in [compiled._folder(), *compiled._folder().parents]


def test_a_link_is_not_followed(places: tuple[Path, Path], tmp_path: Path) -> None:
    ours = compiled._folder().parent
    elsewhere = tmp_path / "elsewhere"
    ours.rename(elsewhere)
    ours.symlink_to(elsewhere)
    assert places[1] in compiled._folder().parents


def test_other_instructions_have_a_folder_of_their_own(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compiled._folder()
    monkeypatch.setattr(compiled, "features", lambda: frozenset({"avx2"}))
    assert compiled._folder() != before
