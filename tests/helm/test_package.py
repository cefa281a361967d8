"""The chart as an archive, as it is published."""

from __future__ import annotations

import tarfile
import tomllib

import helm_python
import pytest

from tests.helm.charts import CHART, NAMESPACE, ROOT, Helm3, Helm4, Refused, objects_in


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> str:
    return helm_python.package(str(CHART), destination=str(tmp_path_factory.mktemp("package")))


def test_archive_has_exactly_the_files_of_the_chart(archive):
    with tarfile.open(archive) as file:
        names = {name.removeprefix("kvplane/") for name in file.getnames()}
    assert {"Chart.yaml", "values.schema.json", "README.md", "files/try.py", "templates/tests/try.yaml"} <= names
    assert not any(name.startswith("ci/") for name in names)


def test_archive_renders_as_the_directory(archive):
    texts = helm_python.Chart.load(archive).render({}, name="kvplane", namespace=NAMESPACE)
    found = [one for path, text in texts.items() if path.endswith(".yaml") for one in objects_in(text)]
    assert sorted(map(str, found)) == sorted(map(str, Helm4().objects({})))


def test_chart_has_the_version_of_the_program():
    program = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    metadata = helm_python.Chart.load(str(CHART)).metadata
    assert metadata["appVersion"] == program
    assert all(f":{program}" in line for line in metadata["annotations"]["artifacthub.io/images"].splitlines()[1:4:2])


def test_an_older_kubernetes_is_refused():
    with pytest.raises(Refused, match="requires kubeVersion"):
        Helm3("1.28.9").text({})
