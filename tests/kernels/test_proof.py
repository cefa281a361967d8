"""The start check: a correct backend passes, a backend with a planted fault fails, and auto takes the next one."""

from __future__ import annotations

import multiprocessing
import re
import sys
import threading
from types import ModuleType

import pytest
import torch

from kvplane.base.errors import FailedPrecondition
from kvplane_kernels import proof, select
from kvplane_kernels.interface import PAGE_OPERATIONS
from kvplane_kernels.torch_ops import TorchOps
from kvplane_kernels.trial import Trial
from kvplane_kernels.trials import FORMS, attention_trials, page_trials, trials, write_trials
from kvplane_kernels.triton_ops.backend import TritonOps
from tests.kernels import interpreter
from tests.kernels.contract import CHECKS
from tests.kernels.faults import FAULTS

CPU = torch.device("cpu")
PLANTED = "tests.kernels.planted"


def here(path, device, operations=()):
    """Run the start check in this process, where the test has planted the backend."""
    return proof.prove(proof.load(path)(), device, operations)


@pytest.fixture
def planted(monkeypatch):
    """List a backend before torch: the result of `make()`, with no unfit device."""

    def plant(make) -> None:
        class Entry:
            def __new__(cls):
                return make()

            @staticmethod
            def unfit(device: torch.device) -> str:
                return ""

        module = ModuleType("kvplane_kernels.planted_ops")
        module.Entry = Entry  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        chosen = {"planted": "planted_ops:Entry", "torch": select.BACKENDS["torch"]}
        monkeypatch.setattr(select, "BACKENDS", chosen)

    return plant


def test_trials_cover_every_operation_and_attention_variant():
    tried = trials(CPU)
    assert {trial.operation for trial in tried} == CHECKS.keys()
    assert len({(trial.operation, trial.name) for trial in tried}) == len(tried)
    assert len(attention_trials(CPU)) == 2 * len(FORMS)


def test_correct_backend_is_chosen_with_its_proof(planted):
    made = []

    def make() -> TorchOps:
        made.append(TorchOps())
        return made[-1]

    planted(make)
    choice = select.choose(CPU, prove=here)
    assert choice.ops is made[-1]
    assert len(made) == 2
    assert choice.reasons[0].startswith(f"planted: chosen; {len(trials(CPU))} trials equal to torch in ")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.operation}: {fault.name}")
def test_backend_with_a_fault_is_not_used(planted, fault):
    planted(lambda: fault.planted(TorchOps()))
    choice = select.choose(CPU, prove=here)
    assert isinstance(choice.ops, TorchOps)
    assert choice.reasons[0].startswith(f"planted: failed its start check: {fault.operation} (")
    assert choice.reasons[1] == "torch: chosen"


class Broken(TorchOps):
    def mla_decode(self, query, pages, batch, scale, value_size, lse=None):
        raise OSError("ptxas: not found\nCommand failed with exit status 255")


def test_crashing_backend_is_skipped_or_an_error_by_name(planted):
    planted(Broken)
    why = r"planted: failed its start check: mla_decode \(.*\): OSError: Command failed with exit status 255"
    with pytest.raises(FailedPrecondition, match=why) as refusal:
        select.choose(CPU, "planted", prove=here)
    assert refusal.value.remedy
    assert isinstance(select.choose(CPU, prove=here).ops, TorchOps)


def test_only_named_operations_are_tried():
    assert here(f"{__name__}:Broken", CPU, PAGE_OPERATIONS).failure == ""
    assert here(f"{__name__}:Broken", CPU, ("mla_decode",)).failure.startswith("mla_decode (")
    assert {trial.operation for trial in page_trials(CPU)} == set(PAGE_OPERATIONS)


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("Sound", ""),
        ("Wrong", r"copy_pages \(chains\): \d+ bytes of memory differ"),
        ("Aborts", "its process ended with SIGABRT: "),
        ("Exits", "its process ended with exit code 3: the device is lost"),
    ],
)
def test_start_check_runs_in_a_subprocess(name, failure):
    found = proof.prove_in_subprocess(f"{PLANTED}:{name}", CPU, PAGE_OPERATIONS)
    assert re.fullmatch(failure + ".*", found.failure)
    assert found.trials == (len(page_trials(CPU)) if name == "Sound" else 1 if name == "Wrong" else 0)


def test_hanging_start_check_ends_on_stop():
    stop = threading.Event()
    timer = threading.Timer(0.5, stop.set)
    timer.start()
    assert proof.prove_in_subprocess(f"{PLANTED}:Hangs", CPU, PAGE_OPERATIONS, stop).failure == "it was stopped"
    assert multiprocessing.active_children() == []


def test_hanging_start_check_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(proof, "LIMIT_S", 0.5)
    assert proof.prove_in_subprocess(f"{PLANTED}:Hangs", CPU, PAGE_OPERATIONS).failure == "no end within 0 s"


def test_start_check_restores_torch_modes():
    before = torch.get_deterministic_debug_mode()
    assert proof.prove(Broken(), CPU).failure
    assert torch.get_deterministic_debug_mode() == before


def differences(tried: list[Trial]) -> list[str]:
    interpreter.quicken()
    ops, found = TritonOps(), []
    for trial in tried:
        found.append(proof.difference(trial, ops, TorchOps()))
    assert not ops.fallbacks, "kernels support every trial"
    return found


def test_kernels_keep_the_contract_in_the_interpreter():
    tried = [*page_trials(CPU), *write_trials(CPU), attention_trials(CPU)[0]]
    assert differences(tried) == [""] * len(tried)


@pytest.mark.nightly
def test_kernels_pass_every_trial_in_the_interpreter():
    tried = list(trials(CPU))
    assert differences(tried) == [""] * len(tried)
