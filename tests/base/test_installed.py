"""The pip command that adds extras to an installation, by how that was installed."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError

import pytest

from kvplane.base import installed
from kvplane.base.installed import command_for

CLONE = "pip install '.[fleet]' in a clone of kvplane"


class Recorded:
    """A distribution that was installed from somewhere."""

    def __init__(self, origin: object) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._origin is None else json.dumps(self._origin)


def command(monkeypatch, origin: object) -> str:
    monkeypatch.setattr(installed, "distribution", lambda name: Recorded(origin))
    return command_for("fleet")


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        (None, "pip install 'kvplane[fleet]'"),
        (
            {"url": "https://example.org/k.git", "vcs_info": {"vcs": "git", "commit_id": "0a1b"}},
            "pip install 'kvplane[fleet] @ git+https://example.org/k.git@0a1b'",
        ),
        (
            {"url": "https://example.org/kvplane-0.1.0.tar.gz", "archive_info": {}},
            "pip install 'kvplane[fleet] @ https://example.org/kvplane-0.1.0.tar.gz'",
        ),
        ({"url": "file:///no/such/folder", "dir_info": {}}, CLONE),
    ],
    ids=["index", "git", "archive", "folder that is gone"],
)
def test_the_command_installs_from_where_kvplane_came(monkeypatch, origin, said):
    assert command(monkeypatch, origin) == said


@pytest.mark.parametrize(("editable", "option"), [(True, "--editable "), (False, "")])
def test_a_folder_is_named_with_its_spaces(monkeypatch, tmp_path, editable, option):
    folder = tmp_path / "my clone"
    folder.mkdir()
    origin = {"url": folder.as_uri(), "dir_info": {"editable": editable}}
    assert command(monkeypatch, origin) == f"pip install {option}'{folder}[fleet]'"


def test_a_source_tree_on_the_path_names_the_clone(monkeypatch):
    def distribution(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installed, "distribution", distribution)
    assert command_for("fleet") == CLONE
