"""Outputs: refused before the work where they cannot be, put in place whole, and named with their flag when the disk is full."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from engine.core.errors import ConfigError, OutputError
from engine.writing import check_file, check_folder, make_folder, whole_file
from tests.disk import REASON, full_disk


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with whole_file("--output", path) as beside:
        beside.write_text("one")
        assert not path.exists()
    assert path.read_text() == "one"
    with pytest.raises(OutputError) as caught, full_disk(100), whole_file("--output", path) as beside:
        beside.write_text("x" * 1000)
    assert str(caught.value) == f"--output {path} cannot be written: {REASON}"
    interrupted = whole_file("--output", path)
    interrupted.__enter__().write_text("half")
    assert not interrupted.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_path_is_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "far" / "x.html", tmp_path / "x.html"
    target.parent.mkdir()
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    with whole_file("--output", link) as beside:
        beside.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with whole_file("--output", Path("/dev/null")) as written:
        assert str(written) == "/dev/null"
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with (
        pytest.raises(OutputError, match="--output /dev/full cannot be written: No space left"),
        whole_file("--output", Path("/dev/full")) as w,
    ):
        w.write_text("x")


def test_files_are_checked_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path, "it is a folder"),
        (tmp_path / "no" / "x", "its folder does not exist"),
        (tmp_path / "file" / "x", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_file("--out", path)
        assert str(caught.value) == f"--out {path} cannot be written: {reason}"
    check_file("--out", tmp_path / "file")
    check_file("--out", Path("/dev/null"))
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_not_named_like_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--out .*demo\.HTML names a file; needed: a folder, which will hold the report"):
        make_folder("--out", tmp_path / "demo.HTML", "the report")
    (tmp_path / "old.html").mkdir()
    for name in ("old.html", "v0.1", "a/b/c"):
        make_folder("--out", tmp_path / name, "the report")
        assert (tmp_path / name).is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out .*file cannot be written: File exists"):
        make_folder("--out", tmp_path / "file", "the report")
    check_folder("--out", tmp_path / "none", "the report")
    assert not (tmp_path / "none").exists()
