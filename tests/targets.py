"""Which tests run when: `make test`, targets that run when their sources change, and `make test-nightly`.

A test that is named on the command line runs in any case. So does every test with `--all` (`make test-all`).

A *guarded* target, such as the kernels, costs minutes and reads few sources. `passed.json` has the digest of these
sources at which `make test-TARGET` passed last; while it is that of the sources here, `make test` leaves the target
out and reports it. An unknown digest is another one: a change of a source needs a run of the target, here or in CI.

    python -m tests.targets tests TARGET      the files and folders of the target
    python -m tests.targets record TARGET     after the target has passed
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PASSED = Path(__file__).with_name("passed.json")
FINDS = Path(__file__).parent / "core/native_finds.json"


@dataclass(frozen=True)
class Guarded:
    """Tests that are left out of `make test` while their sources are what they were when the tests passed.

    Attributes:
        tests, sources: files and folders, relative to the root of the repository; tests are sources too.
    """

    tests: tuple[str, ...]
    sources: tuple[str, ...]

    def digest(self) -> str:
        """The digest of all sources: of their names and contents."""
        whole = hashlib.sha256()
        for path in sorted({path for name in (*self.tests, *self.sources) for path in files(ROOT / name)}):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            whole.update(f"{path.relative_to(ROOT).as_posix()} {content}\n".encode())
        return whole.hexdigest()


GUARDED = {
    "kernels": Guarded(
        tests=("tests/kernels", "tests/engine/test_kinds.py", "tests/bench/test_gpu.py"),
        sources=(
            *("gpu_worker/kvplane_kernels", "tests/engine/reference", "tests/bench/gpu"),
            *("tests/engine/stress.py", "tests/engine/twin.py", "tests/engine/backends.py", "tests/engine/world.py"),
            "clients/python/kvplane/base/errors.py",
            "tests/conftest.py",
            "locks",
        ),
    ),
    "chart": Guarded(
        tests=("tests/helm",),
        sources=(
            *("helm", "docker", "scripts/chart.py", "scripts/helm.sh", "tests/conftest.py", "locks"),
            *("service/kvplane_service/config.py", "service/kvplane_fleet/settings.py"),
            *("tests/store/servers.py", "tests/worker/rig.py", "tests/worker/children.py", "tests/service/guarded.py"),
            *("tests/service/certificates.py", "tests/plan/layers.py", "tests/test_readme.py"),
        ),
    ),
}

# Files, folders and functions that take long, with what they are. They prove that other tests can fail, or do
# more of what runs in `make test` too.
NIGHTLY = {
    "tests/packaging/test_images.py": "the install steps of the images",
    "tests/packaging/test_install.py": "installs into empty environments",
    "tests/packaging/test_native_build.py": "compiles all libraries several times",
    "tests/packaging/test_new_column.py": "compiles the core with further columns",
    "tests/packaging/test_static_checks.py": "faults that the static checks must find",
    "tests/packaging/test_wheel.py": "builds the wheel",
    "tests/vllm/test_clean_install.py": "installs into empty environments",
    "tests/core/test_native_faults.py": "compiles the core with all planted faults",
    "tests/core/test_native_damage.py": "damage that the core's check must find",
    "tests/engine/test_faults.py": "faults that the stress must find",
    "tests/engine/test_stress.py": "random engines on real pages",
    "tests/faults/test_campaign.py": "random faults of real processes",
    "tests/faults/test_twins.py": "faults of real processes, with and without a planted one",
    "tests/router/test_twins.py": "faults that the campaigns of the router must find",
    "tests/fleet/test_campaign.py": "faults of real processes",
    "tests/fleet/test_planted.py": "faults that the campaign of a fleet must find",
    "tests/fleet/test_fleet.py": "services of a fleet come and go under load",
    "tests/sim/test_further_runs.py": "seeds 61 to 120",
    "tests/sim/test_runs.py::test_campaign_in_two_processes_has_the_same_digest": "how campaigns are run",
    "tests/sim/test_mirrors.py::test_twin_of_a_mirror_is_caught": "faults that the simulation must find",
    "tests/sim/test_tiers.py::test_a_twin_with_tiers_is_caught": "faults that the simulation must find",
    "tests/sim/test_twins.py": "faults that the simulation must find",
    "tests/soak/test_soak.py::test_short_soak_completes": "growth over time",
    "tests/store/test_store_fuzz.py::test_further_damaged_files_end_no_service": "more seeds",
    "tests/store/test_store_fuzz.py::test_a_damaged_value_in_redis_ends_no_service": "what SQLite shows, with Redis",
    "tests/store/test_store_fuzz.py::test_a_forged_value_in_redis_ends_no_service": "what SQLite shows, with Redis",
    "tests/cli/test_replay_command.py::test_replay_command_replays_300_requests_of_real_traces": "public traces",
    "tests/cli/test_replay_command.py::test_replay_command_is_deterministic": "two replays",
    "tests/cli/test_replay_command.py::test_replay_with_tiers_says_what_each_one_hit": "three replays",
    "tests/cli/test_replay_command.py::test_replay_takes_a_match_unit": "two replays",
    "tests/cli/test_demo_command.py::test_the_demo_exits_on_a_terminal_where_it_is_asked_to": "one more demo",
    "tests/conformance/test_steps.py::test_further_step_traces_replay_equal_with_one_row_per_part": "more traces",
    "tests/conformance/test_steps_session.py::test_steps_command_prints_a_line_per_path": "a command around others",
    "tests/engine/test_demo.py::test_demo_gets_hits_equal_tokens_and_says_what_the_cache_saved": "`make demo-engine`",
    "tests/bench/test_first_tokens.py": "a benchmark, from each source",
    "tests/cli/test_demo_command.py::test_on_a_terminal_the_demo_serves_until_ctrl_c_after_its_tables": "one more demo",
    "tests/cli/test_hung.py": "stores of real processes hang",
    "tests/cli/test_top.py::test_top_sorts_filters_and_shows_one_of_500_replicas": "500 replicas",
    "tests/conformance/test_replay_unary.py::test_replay_command_prints_a_line_per_file_after_a_difference": "the same",
    "tests/core/test_native.py::test_both_cores_forget_the_same_keys_of_hazard": "more keys than are remembered",
    "tests/core/test_native.py::test_domains_of_many_tenants": "1,300 tenants",
    "tests/core/test_native.py::test_keys_that_are_remembered_no_more": "more keys than are remembered",
    "tests/core/test_native_index.py": "compiles the index with other widths",
    "tests/core/test_permissions.py::test_random_steps_reach_most_permissions": "coverage of a campaign",
    "tests/fuzz/test_steps.py::test_seeds_are_equal_on_both_cores_and_reach_every_operation": "seeds of the fuzzer",
    "tests/service/test_input_costs.py::test_every_way_in_has_a_bound": "measures each way in",
    "tests/service/test_input_costs.py::test_no_message_costs_more_than_its_way_in_may": "measures them",
    "tests/service/test_status_page.py::test_page_shows_five_hundred_replicas": "500 replicas",
    "tests/service/auth/test_attacks.py::test_parts_of_messages_over_grpc_take_what_their_number_allows": "1 GB",
    "tests/worker/test_nixl.py::test_peers_that_come_and_go_leave_nothing_at_an_agent": "growth over time",
    "tests/worker/test_nixl.py::test_no_descriptor_and_no_process_is_left": "growth over time",
    "tests/sim/test_operators.py::test_slots_that_hold_what_was_evicted_are_damaged": "coverage of a campaign",
    "tests/sim/test_hanging.py::test_calls_of_the_store_are_refused_and_one_log_is_unreadable": "two further seeds",
    "tests/sim/test_hanging.py::test_twin_that_hangs_is_caught": "faults that the simulation must find",
    "tests/sim/test_mirrors.py::test_mirrored_engines_break_no_rule": "five seeds",
    "tests/sim/test_tiers.py::test_equal_seeds_with_tiers_give_equal_runs": "one more run, twice",
    "tests/store/test_away.py::test_an_hour_without_redis_loses_no_change": "an hour of changes",
    "tests/worker/test_kills.py": "kills of real processes",
    "tests/core/test_page_contents.py::test_random_engines_reach_hits": "coverage of a campaign",
    "tests/core/test_state.py::test_a_part_that_is_left_out_is_caught": "faults that a comparison must find",
    "tests/core/test_step_law.py::test_a_load_that_its_row_does_not_end_is_caught": "a fault that must be found",
    "tests/engine/test_tiers.py::test_planted_fault_of_tiers_is_caught": "faults that the stress must find",
    "tests/peers/test_campaign.py::test_a_planted_fault_of_the_reader_is_found": "faults that the campaign must find",
    "tests/packaging/test_generated_code.py::test_generated_code_works_on_protobuf": "installs protobuf",
    "tests/conformance/test_kinds.py::test_short_recordings_contain_what_the_traces_lack": "coverage",
    "tests/bench/test_peer.py::test_peer_benchmark_measures_every_case_on_all_sides": "a benchmark",
}

# Functions of many cases: `make test` runs one case of this number, and each one that is recorded to find a planted
# fault; `make test-nightly` runs the others.
SAMPLED = {
    "tests/cli/test_adoption.py::test_a_draining_service_hands_over_its_replicas": 2,
    "tests/cli/test_adoption.py::test_a_resumed_former_owner_gives_up_its_replica": 2,
    "tests/cli/test_adoption.py::test_an_asyncio_session_and_a_subscriber_follow_an_adopted_replica": 2,
    "tests/cli/test_adoption.py::test_replicas_of_a_killed_service_are_adopted_twice": 2,
    "tests/cli/test_replay_command.py::test_replay_error_is_one_line_and_an_exit_code": 3,
    "tests/client/test_machine.py::test_the_machine_works_or_has_ended_after_every_schedule": 3,
    "tests/conformance/test_kinds.py::test_short_recording_replays_equal": 3,
    "tests/conformance/test_replay.py::test_a_change_of_any_recorded_output_is_found": 5,
    "tests/conformance/test_replay.py::test_operation_trace_replays_equal": 2,
    "tests/conformance/test_replay.py::test_replay_command_refuses_invalid_records_by_name": 3,
    "tests/conformance/test_replay_session.py::test_operation_trace_replays_equal_in_a_session": 2,
    "tests/conformance/test_replay_unary.py::test_operation_trace_replays_equal_by_unary_calls": 3,
    "tests/conformance/test_steps.py::test_a_change_after_the_last_step_is_found": 3,
    "tests/conformance/test_steps.py::test_a_change_of_any_recorded_step_output_is_found": 3,
    "tests/conformance/test_steps.py::test_step_trace_replays_equal_in_whole_steps": 2,
    "tests/conformance/test_steps.py::test_step_trace_replays_equal_with_one_row_per_part": 3,
    "tests/conformance/test_steps_session.py::test_step_trace_replays_equal_in_a_session": 3,
    "tests/core/test_aligned_rows.py::test_every_core_clips_a_chunk_alike": 4,
    "tests/core/test_busy_blocks.py::test_late_writes_of_loads_change_no_page_with_a_key": 8,
    "tests/core/test_core_version.py::test_a_changed_rule_shows": 3,
    "tests/core/test_fast_path.py::test_the_fast_path_changes_no_decision": 2,
    "tests/core/test_hazard.py::test_it_learns_what_hints_of_the_engine_are_worth": 3,
    "tests/core/test_image.py::test_a_changed_image_is_refused_or_keeps_the_invariants": 3,
    "tests/core/test_image.py::test_a_replica_resumed_from_an_engine_s_image_has_correct_pages": 3,
    "tests/core/test_image.py::test_a_resumed_replica_decides_as_the_original": 8,
    "tests/core/test_native_images.py::test_damaged_bytes_of_an_image_are_refused_or_do_no_harm": 3,
    "tests/core/test_open_step.py::test_an_open_step_equals_the_recorded_step_applied_whole": 3,
    "tests/core/test_page_contents.py::test_a_page_holds_what_its_key_says": 8,
    "tests/core/test_spec_refusals.py::test_what_is_refused_goes_wrong_without_the_rule": 6,
    "tests/core/test_state.py::test_a_loaded_replica_answers_every_later_step_equally": 8,
    "tests/core/test_step_law.py::test_a_whole_step_equals_the_same_step_with_one_row_per_part": 4,
    "tests/core/test_tier_contents.py::test_a_loaded_page_holds_what_its_key_says": 8,
    "tests/engine/test_canary.py::test_a_sound_engine_has_no_mismatch": 8,
    "tests/engine/test_canary.py::test_one_damaged_slot_of_any_layer_is_found_before_a_launch_reads_it": 3,
    "tests/engine/test_tiers.py::test_tokens_equal_the_dense_model_with_bad_movers": 3,
    "tests/engine/test_tiers.py::test_tokens_with_a_host_tier_equal_the_dense_model": 8,
    "tests/peers/test_campaign.py::test_no_token_differs_and_nothing_is_left": 8,
    "tests/plan/test_planner_costs.py::test_a_plan_of_the_most_layers_has_a_bounded_cost": 3,
    "tests/router/test_hits.py::test_claims_equal_brute_force": 3,
    "tests/router/test_replicas.py::test_claims_equal_find_cache_hit": 4,
    "tests/service/test_fuzz.py::test_a_mutated_call_is_answered_or_refused_and_a_refusal_changes_nothing": 6,
    "tests/service/test_fuzz.py::test_a_mutated_session_is_answered_or_refused_and_a_refusal_changes_nothing": 2,
    "tests/service/test_mirror_random.py::test_a_mirror_is_right_or_hidden": 6,
    "tests/service/test_recording.py::test_curve_is_what_engines_of_the_same_requests_hit_in_each_pool": 2,
    "tests/service/test_replay.py::test_replay_is_deterministic": 4,
    "tests/service/test_replay_real_traces.py::test_real_trace_with_a_large_pool_has_exactly_the_hits_of_its_ids": 2,
    "tests/service/test_replay_real_traces.py::test_real_trace_with_a_small_pool_has_the_hits_of_lru": 3,
    "tests/service/test_sent_steps.py::test_steps_of_random_engines_are_applied_alike_as_messages": 4,
    "tests/service/test_sent_steps.py::test_steps_with_tiers_are_applied_alike_as_messages": 2,
    "tests/sim/test_long_steps.py::test_long_steps_on_a_thread_break_no_rule": 2,
    "tests/sim/test_runs.py::test_runs_do_not_depend_on_the_core": 2,
    "tests/sim/test_runs.py::test_seeds_that_found_a_fault_break_no_rule": 3,
    "tests/store/test_store_fuzz.py::test_a_damaged_file_ends_no_service": 2,
    "tests/store/test_store_fuzz.py::test_a_forged_row_ends_no_service": 3,
    "tests/test_docs_site.py::test_fault_ends_the_build": 3,
    "tests/test_reference.py::test_changed_page_is_found_and_written_again": 3,
    "tests/vllm/test_surface.py::test_a_change_in_vllm_changes_the_surface": 2,
}

# Files that take longest, longest first. A parallel run begins with them: one that began last would run alone.
LONGEST = (
    *(
        "tests/conformance/test_steps.py",
        "tests/sim/test_runs.py",
        "tests/core/test_image.py",
        "tests/sim/test_tiers.py",
    ),
    *("tests/core/test_tier_contents.py", "tests/cli/test_demo_command.py", "tests/cli/test_hung.py"),
    *("tests/sim/test_hanging.py", "tests/service/test_status_page.py", "tests/engine/test_disk_restarts.py"),
    *("tests/core/test_step_law.py", "tests/service/auth/test_attacks.py", "tests/test_tidy.py"),
    *("tests/cli/test_replay_command.py", "tests/service/test_mirror_random.py", "tests/core/test_hazard.py"),
    *("tests/store/test_store_fuzz.py", "tests/fuzz/test_steps.py", "tests/cli/test_top.py"),
    *("tests/plan/test_planner_costs.py", "tests/client/test_machine.py", "tests/core/test_open_step.py"),
)


def place_of(path: str) -> int:
    """Return the place of a test's file in a parallel run: ascending, the same for all but the longest."""
    return LONGEST.index(path) if path in LONGEST else len(LONGEST)


def is_in(path: str, names: Iterable[str], function: str = "") -> bool:
    """Whether a test's file, relative to the root, or its function, is one of these or in one of these folders."""
    return any(name in (path, f"{path}::{function}") or path.startswith(f"{name}/") for name in names)


class Sample:
    """Chooses which cases of the functions in `SAMPLED` run in `make test`, in the order of collection."""

    def __init__(self) -> None:
        self._seen = Counter[str]()
        self._finds = frozenset(json.loads(FINDS.read_text()).values())

    def leaves_out(self, case: str) -> bool:
        """Whether the case, a pytest node, runs at night only."""
        function, _, _ = case.partition("[")
        self._seen[function] += 1
        return (self._seen[function] - 1) % SAMPLED.get(function, 1) != 0 and case not in self._finds


def recorded() -> dict[str, str]:
    """Digest of each target's sources when it passed last."""
    return dict(json.loads(PASSED.read_text())) if PASSED.exists() else {}


def unchanged() -> list[str]:
    """The guarded targets whose sources are what they were when their tests passed."""
    return [name for name, target in GUARDED.items() if recorded().get(name) == target.digest()]


def record(name: str) -> None:
    """Note that the tests of a target have passed on the sources that are here."""
    PASSED.write_text(json.dumps({**recorded(), name: GUARDED[name].digest()}, indent=1, sort_keys=True) + "\n")


def files(path: Path) -> Iterator[Path]:
    """The file itself, or all files below a folder."""
    if path.is_file():
        yield path
    for one in path.rglob("*") if path.is_dir() else ():
        if one.is_file() and "__pycache__" not in one.parts:
            yield one


if __name__ == "__main__":
    verb, target = sys.argv[1:]
    assert verb in ("tests", "record"), __doc__
    if verb == "tests":
        print(*GUARDED[target].tests)
    else:
        record(target)
