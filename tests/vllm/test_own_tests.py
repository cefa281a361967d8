"""vLLM's own tests of its scheduler and its KV cache manager, unmodified, with kvplane's manager.

known.json lists the tests that fail, by reason: what kvplane lacks ("gap"), and what reads or changes the inside of
vLLM's objects ("inside"). The list may only shrink. Tests that fail on stock vLLM here as well are not counted.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.service.rig import running
from tests.vllm import environment

KNOWN = json.loads(Path(__file__).with_name("known.json").read_text())
FILES = (
    "test_prefix_caching.py",
    "test_scheduler.py",
    "test_async_scheduler.py",
    "test_mamba_align_chunk_split.py",
    "test_prefix_replay.py",
    "test_swa_inflight_window_free.py",
    "test_priority_preemption_bug.py",
    "test_deferred_block_free.py",
    "prefix_cache",
)
CONNECTOR_FILES = (
    "offloading_connector/test_scheduler.py",
    "test_cache_pollution_prevention.py",
    "test_error_propagation.py",
    "test_invalid_blocks_correctness.py",
    "test_kv_load_failure_recovery.py",
    "test_multi_connector.py",
    "test_remote_decode_lifecycle.py",
    "test_remote_prefill_lifecycle.py",
)
PATHS = (*(f"core/{name}" for name in FILES), *(f"kv_connector/unit/{name}" for name in CONNECTOR_FILES))


def outcomes(folder, *options, address=""):
    """By test: whether it passed; skipped tests are left out."""
    report = folder / "junit.xml"
    paths = [f"tests/v1/{path}" for path in PATHS]
    command = [str(environment.PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    env = environment.variables() | {"KVPLANE_REPORT": str(folder / "used.json"), "KVPLANE_MIRROR": address}
    env["XDG_RUNTIME_DIR"] = str(folder)  # for the locks of hundreds of managers
    subprocess.run([*command, *options, *paths], cwd=environment.SOURCE, env=env, capture_output=True, check=False)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            name = f"{case.get('classname')}::{case.get('name')}".removeprefix("tests.v1.").removeprefix("core.")
            found[name] = case.find("failure") is None and case.find("error") is None
    return found


def test_each_known_failure_has_a_reason():
    assert set(KNOWN) == {"gap", "inside"}
    for reasons in KNOWN.values():
        assert all(reason and names == sorted(set(names)) for reason, names in reasons.items())


@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_vllms_own_tests_pass_but_for_the_known_ones(tmp_path):
    environment.set_up()
    (tmp_path / "stock").mkdir()
    stock = outcomes(tmp_path / "stock")
    ours = outcomes(tmp_path, "-p", "own_tests_plugin")
    used = json.loads((tmp_path / "used.json").read_text())
    fallback = [name for name, managers in used.items() if managers == ["stock"]]
    assert sum(stock.values()) > 500
    passing = {name for name, passed in ours.items() if passed}
    failed = {name for name, passed in stock.items() if passed} - passing
    known = {name for reasons in KNOWN.values() for names in reasons.values() for name in names}
    by_file = Counter(name.split("::")[0] for name, passed in stock.items() if passed)
    failed_by_file = Counter(name.split("::")[0] for name in failed)
    for name, count in sorted(by_file.items()):
        print(f"{name}: {count - failed_by_file[name]} of {count}")
    print(f"{len(fallback)} tests used vLLM's own manager only")
    (tmp_path / "failed.json").write_text(json.dumps(sorted(failed), indent=1))
    assert failed - known == set(), "fail now: fix them, or give the reason in known.json"
    assert known - failed == set(), "pass now: remove them from known.json"


@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_a_service_answers_every_step_of_vllms_own_tests_equally(tmp_path):
    """Mode mirror: the same tests fail as in process, no answer of the service differs, and a call of the manager sends
    one message at most.
    """
    environment.set_up()
    with running() as service:
        ours = outcomes(tmp_path, "-p", "own_tests_plugin", address=service.address)
    used = json.loads((tmp_path / "used.json").read_text())
    print(f"{used.pop('steps compared')[0]} steps compared, {used.pop('messages')[0]}")
    assert {name: found for name, found in used.items() if set(found) - {"kvplane", "stock"}} == {}
    known = {name for reasons in KNOWN.values() for names in reasons.values() for name in names}
    failed = {name for name, passed in ours.items() if not passed}
    assert sum(ours.values()) > 500
    assert known - failed == set()
    print(f"{len(failed - known)} tests fail that are not known: compare with stock")
    (tmp_path / "failed.json").write_text(json.dumps(sorted(failed - known), indent=1))
