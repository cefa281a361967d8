"""What `make cluster-test` does without a cluster: its refusals, its table, and that its engine finds wrong pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvplane
from tests.cluster.__main__ import main
from tests.cluster.access import Found, wanted
from tests.cluster.cluster import Cluster, Failed, Image, Images
from tests.cluster.load import difference, total
from tests.cluster.pods.engine import SPEC, Engine, Talks, Tally, compare
from tests.cluster.programs import files, key_of, volume
from tests.cluster.runs import Run
from tests.cluster.table import Row, Table
from tests.service.rig import running

IMAGE = "registry.example.org/kvplane/service:1"
# Answers as kubectl does, from files, and notes what was asked.
KUBECTL = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$*" in
  *get-contexts*) cat {folder}/contexts ;;
  *raw=/version*) cat {folder}/version || {{ echo "error: no route to host" >&2; exit 1; }} ;;
  *raw=/apis*) echo '{{"groups": [{{"name": "apps"}}]}}' ;;
  *SelfSubject*|*create*--filename=-*--output=json*) cat >> {folder}/asked; cat {folder}/reviews ;;
  *"get nodes"*) echo '{{"items": [{{}}, {{}}]}}' ;;
  *"get pods"*) echo pod/engine-0 ;;
  *apply*) cat >> {folder}/made; exit $(cat {folder}/status) ;;
esac
"""


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fake kubectl that permits everything."""
    script = tmp_path / "kubectl"
    script.write_text(KUBECTL.format(folder=tmp_path))
    script.chmod(0o755)
    (tmp_path / "contexts").write_text("kind-one\nkind-two\n")
    (tmp_path / "version").write_text('{"gitVersion": "v1.36.2"}')
    (tmp_path / "reviews").write_text(reviews({}))
    (tmp_path / "status").write_text("0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", "clusters.yaml")
    return tmp_path


def reviews(denied: dict[str, str]) -> str:
    """What the server answers, a document for each permission, of which it denies one verb of a resource."""
    allowed = [denied.get(one["resource"]) != one["verb"] for one in wanted()]
    return "\n".join(json.dumps({"kind": "SelfSubjectAccessReview", "status": {"allowed": one}}) for one in allowed)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert not said.out
    return said.err


def test_cluster_test_refuses_a_context_that_is_not_stated_or_not_known(answers, capsys):
    said = refusal(capsys, "--image", IMAGE)
    assert said.startswith("cluster-test: CONTEXT: no context is stated, and the current one is never used: ")
    assert "CONTEXT=NAME" in said
    assert "clusters.yaml has kind-one, kind-two" in said
    said = refusal(capsys, "--image", IMAGE, "--context", "production")
    assert said.startswith("cluster-test: CONTEXT: clusters.yaml has no context 'production': ")
    assert said.endswith("use one of its contexts: kind-one, kind-two\n")
    assert set((answers / "calls").read_text().splitlines()) == {"config get-contexts --output=name"}


def test_cluster_test_refuses_a_server_that_does_not_answer(answers, capsys):
    (answers / "version").unlink()
    said = refusal(capsys, "--image", IMAGE, "--context", "kind-one")
    assert said.startswith("cluster-test: CONTEXT: the cluster does not answer: error: no route to host: try `kubectl ")


def test_cluster_test_names_each_permission_that_is_missing_before_it_makes_anything(answers, capsys):
    (answers / "reviews").write_text(reviews({"namespaces": "delete", "leases": "update", "roles": "create"}))
    said = refusal(capsys, "--image", IMAGE, "--context", "kind-two")
    assert "missing permissions: delete namespaces, " in said
    assert "create roles.rbac.authorization.k8s.io in namespaces" in said
    assert "update leases.coordination.k8s.io in namespaces" in said
    assert "grant it to the account of context kind-two" in said
    assert not (answers / "made").exists()
    asked = [json.loads(one) for one in (answers / "asked").read_text().split("\n---\n")]
    assert {"namespace", "verb", "resource"} < asked[0]["spec"]["resourceAttributes"].keys()
    assert all("--context=kind-two" in call for call in (answers / "calls").read_text().splitlines()[1:])


@pytest.mark.parametrize(
    ("arguments", "field", "remedy"),
    [
        ((), "IMAGE", "docker/service.Dockerfile"),
        (("--image", "kvplane/service"), "IMAGE", "TAG"),
        (("--image", IMAGE, "--worker-image", "a b:1"), "WORKER_IMAGE", "TAG"),
        (("--image", IMAGE, "--only", "lode"), "ONLY", "load, "),
    ],
)
def test_cluster_test_refuses_wrong_arguments_with_a_remedy(answers, capsys, arguments, field, remedy):
    said = refusal(capsys, "--context", "kind-one", *arguments)
    assert said.startswith(f"cluster-test: {field}: ")
    assert remedy in said


def test_image_references_are_read_as_the_chart_has_them():
    digest = f"sha256:{'0' * 64}"
    for text, parts in {
        "localhost/kvplane/service:test": ("localhost", "kvplane/service", "test", ""),
        "registry.example.org:5000/a/b:1@" + digest: ("registry.example.org:5000", "a/b", "1", digest),
        "kvplane/service:1.0": ("docker.io", "kvplane/service", "1.0", ""),
    }.items():
        assert Image.of(text) == Image(*parts)
    for text in ("", "kvplane/service", "A/b:1", "a/b:1@sha256:12"):
        assert Image.of(text) is None


def test_table_has_a_line_per_row_and_counts_them():
    lines: list[str] = []
    table = Table(lines.append)
    assert not table.is_good  # a run without a row has shown nothing
    table.add(Row("install: default", 12.34, "helm test: granted"))
    table.add(Row("install: tls", 2, "installed", ("cert-manager",)))
    assert table.is_good
    table.add(Row("  drain", 3, "2 requests were lost", failed=True, kept="kept/drain"))
    assert [line.split() for line in lines] == [
        ["passed", "12.3", "s", "install:", "default", "helm", "test:", "granted"],
        ["partly", "2.0", "s", "install:", "tls", "installed"],
        ["left", "out:", "cert-manager"],
        ["FAILED", "3.0", "s", "drain", "2", "requests", "were", "lost"],
        ["kept", "in", "kept/drain"],
    ]
    assert not table.is_good
    assert table.summary() == "cluster-test: 1 passed, 1 with parts left out, 1 failed, in 17 s"


def test_a_row_that_fails_keeps_what_explains_it_and_the_next_ones_run(answers):
    service = Image("registry.example.org", "kvplane/service", "1")
    table = Table(lambda line: None)
    run = Run(Cluster("kind-one", Images(service)), Found("v1.36.2", 1, frozenset()), answers / "kept", table)
    with run.space("one") as space:
        with run.row("refused", space):
            raise Failed("two requests were lost")
        with run.row("a fault of a case", space):
            assert {}["missing"]
        with run.row("well", space) as seen:
            seen.text = "0 lost"
    assert [(row.failed, row.seen) for row in table.rows] == [
        (True, "two requests were lost"),
        (True, "KeyError: 'missing'"),
        (False, "0 lost"),
    ]
    kept = {path.name for path in (answers / "kept" / "refused").iterdir()}
    assert {"events.txt", "objects.txt", "describe.txt", "pod-engine-0.log"} <= kept
    assert "KeyError" in (answers / "kept" / "a-fault-of-a-case" / "traceback.txt").read_text()
    calls = (answers / "calls").read_text().splitlines()
    assert f"--context=kind-one delete namespace {space.name} --ignore-not-found --wait=false" in calls
    assert json.loads((answers / "made").read_text())["items"][0]["metadata"]["name"] == space.name


def test_a_pod_has_all_that_its_programs_import(tmp_path):
    made = {item["key"]: tmp_path / item["path"] for item in volume()["configMap"]["items"]}
    for name, path in files().items():
        made[key_of(name)].parent.mkdir(parents=True, exist_ok=True)
        made[key_of(name)].write_text(path.read_text())
    there = "import paged, engine; print(paged.Engine.step.__code__.co_filename)"
    done = subprocess.run([sys.executable, "-c", there], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "tests/engine/reference/engine.py")


def engine_counts(service: str, spoil: int) -> Tally:
    """What an engine counts in 60 steps; from one step on, all its pages hold something else."""
    tally, talks = Tally(), Talks(3)
    with kvplane.connect(service) as client:
        client.register_replica("r", SPEC)
        engine = Engine(client, "r", tally)
        for step in range(60):
            if step == spoil:
                for page in engine.pages.held:
                    page[0] += 1
            if tally.asked - tally.answered < 2:
                engine.scheduler.add(talks.next())
                tally.asked += 1
            for request in engine.step():
                compare(request, tally)
                talks.answered(request)
    return tally


def test_the_engine_of_pods_counts_each_wrong_page():
    with running() as service:
        sound = engine_counts(service.address, spoil=-1)
    with running() as service:
        spoilt = engine_counts(service.address, spoil=30)
    assert (sound.wrong_reads, sound.wrong_tokens, sound.refused) == (0, 0, 0)
    assert sound.hit > 0
    assert sound.tokens > 20
    assert spoilt.wrong_reads > 0
    assert spoilt.wrong_tokens > 0


def counts(**changed: object) -> dict[str, object]:
    one = dict.fromkeys(("asked", "answered", "tokens", "read", "prompt", "hit"), 9) | {"longest_s": 1.0}
    return {**one, "refused": 0, "again": 0, "wrong_tokens": 0, "wrong_reads": 0, "kept": [(0, 0)], **changed}


def test_lost_requests_wrong_hits_and_lost_keys_fail_a_row():
    assert total([counts(), counts()]).startswith("18 of 18 requests answered")
    with pytest.raises(Failed, match="1 of 18 requests were lost"):
        total([counts(), counts(answered=8)])
    moved = counts(kept=[(0, 0), (7, 8)])
    assert difference([counts()], [moved], keeps=True).endswith("1 sessions moved, 7 of 8 pages kept their key")
    with pytest.raises(Failed, match="kept 7 keys, and there is no store"):
        difference([counts()], [moved], keeps=False)
    with pytest.raises(Failed, match="kept no key of 8 pages"):
        difference([counts()], [counts(kept=[(0, 0), (0, 8)])], keeps=True)
    for name in ("refused", "wrong_tokens", "wrong_reads"):
        with pytest.raises(Failed, match=name):
            difference([counts()], [counts(**{name: 1})], keeps=None)
