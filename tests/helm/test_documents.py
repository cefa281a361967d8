"""Commands in docs/install.md, the chart's README and NOTES.txt are executed as far as possible."""

from __future__ import annotations

import json
import re
import shlex
import subprocess

import pytest

from tests.helm.charts import CHART, NAMESPACE, ROOT, Helm3, Helm4, values_of
from tests.helm.cluster import Place, cluster
from tests.helm.pods import machine
from tests.helm.schemas import VERSIONS
from tests.test_readme import curl, fenced_blocks

INSTALL = (ROOT / "docs" / "install.md").read_text()
COMMANDS = [line for block in fenced_blocks(INSTALL, "sh") for line in block.splitlines()]


def test_commands_of_the_document_work_in_order(tmp_path):
    """Runs helm's commands; kubectl's remove a StatefulSet, or create secrets, which the emulation does not need."""
    file = tmp_path / "kubeconfig"
    file.touch(0o600)
    with cluster(VERSIONS[0]) as (here, kubeconfig):
        file.write_text(kubeconfig)
        installed = set[str]()
        for line in COMMANDS:
            program, *words = shlex.split(line)
            assert program in ("helm", "kubectl")
            if program == "helm":
                Helm3().run(*words, "--kubeconfig", str(file))
            elif words[:2] == ["delete", "statefulset"]:
                assert here.remove(Place("apps/v1", "statefulsets", NAMESPACE, words[2]))[0] == 200
            installed |= {one["kind"] for one in here.installed()}
    assert {"StatefulSet", "Certificate"} <= installed


def test_readme_has_the_commands_of_the_document():
    (block,) = (block for block in fenced_blocks((ROOT / "README.md").read_text(), "sh") if "helm install" in block)
    assert block.splitlines() == COMMANDS[:2]
    assert block in (CHART / "README.md").read_text()


def test_values_and_files_that_the_document_names_exist():
    table = (CHART / "README.md").read_text()
    for name in re.findall(r"`((?:\w+\.)+\w+)(?:=[\w-]+)?`", INSTALL):
        assert f"| `{name}" in table or (ROOT / name).exists() or (ROOT / "docs" / name).exists(), name
    for path in re.findall(r"`((?:helm|docker|docs)/[\w./-]+)`", INSTALL):
        assert (ROOT / path).exists(), path


@pytest.fixture(scope="module")
def notes() -> str:
    files = Helm4().files({})
    (text,) = (text for path, text in files.items() if path.endswith("NOTES.txt"))
    return text


def test_grpcurl_commands_of_the_notes_work(notes):
    lines = [line.strip() for line in notes.splitlines() if line.strip().startswith("grpcurl")]
    assert len(lines) == 3
    with machine(Helm4().objects({"drain": {"preStopSeconds": 0}})) as node:
        pod = node.start("kvplane-0")
        pod.wait_ready()
        there = f"{pod.ip}:7070"
        listing, status, register = (line.replace("127.0.0.1:7070", there) for line in lines)
        assert "kvplane.v1.Allocation" in buf_list(listing)
        body = shlex.quote(json.dumps({}))
        assert curl(status.replace("-plaintext", f"-plaintext -d {body}"), there)["version"]
        assert curl(register, there)["spec"]
        (command,) = (line.strip() for line in notes.splitlines() if line.strip().startswith("kvplane status"))
        words = shlex.split(command.replace("127.0.0.1:7070", there))
        done = pod.run("kvplane", words)
        assert done.returncode == 0
        assert "1 idle" in done.stdout


def buf_list(line: str) -> str:
    """The output of `grpcurl -plaintext ADDRESS list`, obtained with buf."""
    words = shlex.split(line)
    assert (words[:2], words[3]) == (["grpcurl", "-plaintext"], "list")
    flags = ["--protocol", "grpc", "--http2-prior-knowledge", "--list-services"]
    command = [str(ROOT / "scripts" / "buf.sh"), "curl", *flags, f"http://{words[2]}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize("name", ["default", "ha", "tls", "everything", "gpu-daemonset"])
def test_notes_describe_what_was_installed(name):
    (text,) = (text for path, text in Helm4().files(values_of(name)).items() if path.endswith("NOTES.txt"))
    assert "helm test kvplane --namespace caches" in text
    assert ("-plaintext" in text) == (name not in ("tls", "everything"))
    assert ("Bearer $TOKEN" in text) == (name in ("tls", "everything"))
    assert ("rank-N/worker.sock" in text) == (name in ("everything", "gpu-daemonset"))
    assert "<no value>" not in text
