"""The operating-system module: every system's choice is tested on this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mha_export.targets import _platform


@pytest.mark.parametrize(
    ("system", "code", "name"),
    [
        ("Linux", -11, "SIGSEGV"),
        ("Linux", -9, "SIGKILL"),
        ("Darwin", -6, "SIGABRT"),
        ("Linux", -200, "signal 200"),
        ("Linux", 0, None),
        ("Linux", 3, None),
        ("Windows", 0xC0000005, "access violation"),
        ("Windows", 0xC0000005 - (1 << 32), "access violation"),
        ("Windows", 0xC0000374, "heap corruption"),
        ("Windows", 1, None),
    ],
)
def test_death_is_named(system, code, name) -> None:
    assert _platform.death_of(code, system=system) == name


HOME = Path("home") / "me"


@pytest.mark.parametrize(
    ("system", "environ", "expected"),
    [
        ("Linux", {}, HOME / ".cache" / "mha_export"),
        ("Linux", {"XDG_CACHE_HOME": "x"}, Path("x") / "mha_export"),
        ("Darwin", {}, HOME / "Library" / "Caches" / "mha_export"),
        ("Windows", {"LOCALAPPDATA": "L"}, Path("L") / "mha_export" / "Cache"),
        ("Windows", {}, HOME / "AppData" / "Local" / "mha_export" / "Cache"),
        ("Linux", {"MHA_EXPORT_CACHE": "mine", "XDG_CACHE_HOME": "x"}, Path("mine")),
    ],
)
def test_cache_folder_follows_the_system(system, environ, expected) -> None:
    assert _platform.cache_dir(system=system, environ=environ, home=HOME) == expected


def test_worker_flags() -> None:
    assert _platform.worker_flags(system="Linux") == {"start_new_session": True}
    assert _platform.worker_flags(system="Windows") == {"creationflags": 0x08000000}


def test_replace_file(tmp_path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    new.write_text("new")
    old.write_text("old")
    _platform.replace_file(new, old)
    assert old.read_text() == "new"
    assert not new.exists()


def _mapped_like_windows(monkeypatch, destination: Path) -> None:
    """``Path.replace`` refuses to overwrite ``destination`` until it has been renamed away."""
    real = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if Path(target) == destination and destination.exists():
            raise PermissionError(13, "Access is denied")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", refuse)


def test_a_mapped_file_is_moved_aside_on_windows(tmp_path, monkeypatch) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    new.write_text("new")
    old.write_text("old")
    _mapped_like_windows(monkeypatch, old)
    _platform.replace_file(new, old, system="Windows")
    assert old.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_refused_replacement_is_an_error_elsewhere(tmp_path, monkeypatch) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    new.write_text("new")
    old.write_text("old")
    _mapped_like_windows(monkeypatch, old)
    with pytest.raises(PermissionError):
        _platform.replace_file(new, old, system="Linux")
    assert old.read_text() == "old"


def test_find_program_tries_the_windows_names(tmp_path, monkeypatch) -> None:
    program = tmp_path / "npm.cmd"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _platform.find_program("npm", system="Windows") == program
    assert _platform.find_program("npm", system="Linux") is None


def test_memory_of_this_process_is_seen() -> None:
    assert _platform.rss_mb(os.getpid(), descendants=False) > 10
    assert _platform.rss_mb(2**22 + 12345, descendants=True) == 0.0
    assert _platform.default_memory_limit_mb() >= 1024
    assert _platform.usable_cpus() >= 1
