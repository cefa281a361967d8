"""`kvplane fleet` with a file of engines: it follows them once, and prints what they have."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvplane.base.errors import KvplaneError
from kvplane.v1 import routing_pb2 as pb
from kvplane_tools.cli import app, exit_code
from kvplane_tools.cli.fleet import explanations
from tests.router.engine import EngineProcess, batches
from tests.store.servers import free_port
from tests.test_operating import FLEET


class Done:
    """What a command printed, and its exit code."""

    def __init__(self, *words: str) -> None:
        result = CliRunner().invoke(app, ["fleet", *words])
        self.stdout, self.stderr, self.returncode = result.stdout, result.stderr, result.exit_code
        if isinstance(result.exception, KvplaneError):
            self.stderr, self.returncode = str(result.exception), exit_code(result.exception)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    engine = EngineProcess(events, replay, seed=0)
    try:
        engine.publish(3)
        path = tmp_path_factory.mktemp("fleet") / "places.yaml"
        path.write_text(f"places: [{{name: first, events: '{events}', replay: '{replay}', model: m}}]")
        yield path
    finally:
        engine.kill()


def test_list_names_groups_hashes_and_faults(places):
    done = Done("list", "--places", str(places))
    assert done.returncode == 0, done.stderr
    heading, line = done.stdout.splitlines()
    assert heading.split()[:3] == ["PLACE", "MODEL", "STATE"]
    assert line.split() == ["first", "m", "current", "0", "23", "0", "0", "-"]
    heading, line = Done("list", "--places", str(places), "-o", "wide").stdout.splitlines()
    assert "first  m      current  0          3 " in line
    assert "0 full_attention in 16; 1 sliding_window of 32 in 16" in line
    assert "sha256, default seed, blocks of 16" in line


def test_describe_shows_one_place(places):
    done = Done("describe", "first", "--places", str(places))
    assert "tokens/s from 0 reports" in done.stdout
    missing = Done("describe", "second", "--places", str(places))
    assert missing.returncode == 2
    assert "there is no place 'second'" in missing.stderr


def test_score_has_the_prompts_cached_tokens(places):
    prompt = next(batches(0))[0]["token_ids"]
    tokens = ",".join(map(str, [*prompt, 7]))
    done = Done("score", "--places", str(places), "--tokens", tokens, "--model", "m")
    assert done.stdout.splitlines()[1].split()[:2] == ["first", str(len(prompt))]
    assert "it is the only candidate" in done.stdout
    other = Done("score", "--places", str(places), "--tokens", tokens, "-o", "json")
    assert other.returncode == 2
    assert "no place has the model ''" in other.stderr


def test_explain_says_for_each_place_why_it_hits_no_more(places):
    prompt = next(batches(0))[0]["token_ids"]
    tokens = ",".join(map(str, [*prompt, 7]))
    done = Done("explain", "--places", str(places), "--tokens", tokens, "--model", "m")
    assert done.stdout.startswith(f"first: {len(prompt)} of {len(prompt) + 1} tokens hit")
    assert done.stdout.rstrip().endswith("it is the only candidate")
    assert Done("explain", "--places", str(places), "--tokens", "1,x").returncode == 2
    assert Done("explain", "--places", str(places), "--tokens", "1", "--place", "no").returncode == 2


@pytest.mark.parametrize("command", FLEET)
def test_command_of_the_operating_notes_runs(command, places):
    values = {"PLACE": "first", "MODEL": "m", "ADAPTER": "m"}
    words = [values.get(word, word) for word in command.removesuffix(" --watch 5").split()[2:]]
    done = Done(*words, "--places", str(places))
    assert done.returncode == 0, done.stderr
    assert done.stdout


def place_score(**fields):
    groups = [pb.PlaceGroupHit(group=at, **each) for at, each in enumerate(fields.pop("groups", ()))]
    return pb.PlaceScore(place="p", groups=groups, **fields)


FULL = {"kind": "full_attention", "tokens_alone": 160}
CAUSES = {
    "the place is partial": place_score(inexact="the place is partial"),
    "none of its blocks is cached: it was not sent there, or was evicted": place_score(
        groups=[{"kind": "full_attention"}, {"kind": "mamba"}]
    ),
    "group 1 needs the last window before a token, and has it for 32 tokens; another group has 160": place_score(
        hit_tokens=32, groups=[FULL, {"kind": "sliding_window", "tokens_alone": 32, "limits": True}]
    ),
    "group 0 needs every block up to a token, and has it for 32 tokens; another group has 96": place_score(
        hit_tokens=32,
        groups=[{**FULL, "tokens_alone": 32, "limits": True}, {"kind": "mamba", "tokens_alone": 96}],
    ),
    "the blocks after token 160 are not cached, or not whole": place_score(hit_tokens=160, groups=[FULL, FULL]),
    "no length above 64 fits all groups at once": place_score(
        hit_tokens=64, groups=[FULL, {"kind": "sliding_window", "tokens_alone": 160}]
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_names_the_group_that_limits(cause):
    others = pb.PlaceScore(place="q", hit_tokens=5, expected_tokens=500, host_tokens=64, peer_tokens=16, peer="p")
    answer = pb.ScoreResponse(places=[CAUSES[cause], others], reason="p by policy cost")
    first, second, reason = explanations(answer, 200)
    assert f"cause: {cause}" in first
    assert "500 tokens less than the place that has the most" in first
    assert "500 once the prompts that were sent there are computed\nup to 64 more from host memory" in second
    assert "\nup to 16 more from the host memory of peers, such as p, loaded in 0.000 s in all" in second
    assert reason == "p by policy cost"


def test_wrong_use_and_absent_engines_and_routers_are_errors(places, tmp_path):
    assert Done("score", "--places", str(places), "--tokens", "a,b").returncode == 2
    assert Done("score", "--places", str(places), "--tokens", "1", "--policy", "best").returncode == 2
    assert Done("list", "--places", str(tmp_path / "missing")).returncode == 2
    alone = tmp_path / "places.yaml"
    alone.write_text(f"places: [{{name: a, events: 'tcp://127.0.0.1:{free_port()}'}}]")
    done = Done("list", "--places", str(alone), "--within", "0.5")
    assert done.returncode == 3
    assert "no engine of" in done.stderr
    absent = Done("list", "--router", f"127.0.0.1:{free_port()}")
    assert absent.returncode == 3
    assert "KVPLANE_ROUTER" in absent.stderr
