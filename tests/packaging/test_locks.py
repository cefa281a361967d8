"""locks/ agrees with pyproject.toml and names no place to download from; a release asks for its base image's digest."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.packaging.environments import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
CLIENT = PYPROJECT["project"]["dependencies"]
ASKED = {
    "build": PYPROJECT["build-system"]["requires"],
    "service": [*CLIENT, *EXTRAS["service"], *EXTRAS["cli"], *EXTRAS["fleet"]],
    "dev": [*CLIENT, *(line for one in ("service", "cli", "worker", "dev", "fleet", "plot") for line in EXTRAS[one])],
}
PINNED_BY_SETUP = {"torch"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str) -> dict[str, list[tuple[Version, int]]]:
    """Versions of each package of a lock, with the number of their hashes."""
    text = (ROOT / "locks" / f"{name}.txt").read_text().replace("\\\n", " ")
    found: dict[str, list[tuple[Version, int]]] = {}
    for line in text.splitlines():
        if line and not line.lstrip().startswith("#"):
            package, _, version = line.partition(" ")[0].partition("==")
            found.setdefault(canonical(package), []).append((Version(version), line.count("--hash=sha256:")))
    return found


@pytest.mark.parametrize("name", ASKED)
def test_lock_has_a_version_of_everything_that_the_project_allows(name):
    lock = locked(name)
    for text in ASKED[name]:
        requirement = Requirement(text)
        package = canonical(requirement.name)
        if package != "kvplane" and package not in PINNED_BY_SETUP:
            assert all(version in requirement.specifier for version, _ in lock[package]), text


@pytest.mark.parametrize("name", ["build", "service"])
def test_what_goes_into_an_image_is_locked_by_hashes(name):
    assert all(hashes for versions in locked(name).values() for _, hashes in versions)
    dockerfile = (ROOT / "docker" / "service.Dockerfile").read_text()
    assert f"--require-hashes --requirement locks/{name}.txt" in dockerfile


@pytest.mark.parametrize("name", ASKED)
def test_lock_names_no_place_to_download_from(name):
    assert not re.search(r"://|--index|--find-links| @ ", (ROOT / "locks" / f"{name}.txt").read_text())


def test_every_range_of_the_project_has_an_upper_bound():
    open_ended = [
        text
        for texts in (PYPROJECT["build-system"]["requires"], CLIENT, *EXTRAS.values())
        for text in map(Requirement, texts)
        if text.name != "kvplane" and not any(one.operator in ("<", "==") for one in text.specifier)
    ]
    assert open_ended == []


@pytest.mark.parametrize("digest", [None, "", "sha256:abc", "@sha256:" + "0" * 64])
def test_release_asks_for_the_digest_of_the_base_image(digest):
    variables = {key: value for key, value in os.environ.items() if key != "PYTHON_DIGEST"}
    if digest is not None:
        variables["PYTHON_DIGEST"] = digest
    done = subprocess.run([ROOT / "scripts" / "release.sh"], env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "docker buildx imagetools inspect python:3." in done.stderr
