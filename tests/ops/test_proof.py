"""The start check: a sound backend passes, each of the usual mistakes makes it unfit, and auto goes on to the next."""

from __future__ import annotations

import multiprocessing
import re
import sys
import threading
from types import ModuleType

import pytest
import torch

from kvplane.base.errors import FailedPrecondition
from kvplane_worker.ops import proof, select
from kvplane_worker.ops.interface import PAGE_OPERATIONS
from kvplane_worker.ops.torch_ops import TorchOps
from kvplane_worker.ops.trials import FORMS, Trial, attention_trials, page_trials, trials, write_trials
from kvplane_worker.ops.triton_ops.backend import TritonOps
from tests.ops import interpreter
from tests.ops.contract import CHECKS
from tests.ops.faults import FAULTS

CPU = torch.device("cpu")
PLANTED = "tests.ops.planted"


def here(path, device, operations=()):
    """Prove in this process, where a test has planted the backend."""
    return proof.prove(proof.load(path)(), device, operations)


@pytest.fixture
def planted(monkeypatch):
    """Lists a backend before torch's: what `make()` returns, which claims to fit everywhere."""

    def plant(make) -> None:
        class Entry:
            def __new__(cls):
                return make()

            @staticmethod
            def unfit(device: torch.device) -> str:
                return ""

        module = ModuleType("kvplane_worker.ops.planted_ops")
        module.Entry = Entry  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        chosen = {"planted": "planted_ops:Entry", "torch": select.BACKENDS["torch"]}
        monkeypatch.setattr(select, "BACKENDS", chosen)

    return plant


def test_every_operation_is_tried_and_each_form_of_attention():
    tried = trials(CPU)
    assert {trial.operation for trial in tried} == CHECKS.keys()
    assert len({(trial.operation, trial.name) for trial in tried}) == len(tried)
    assert len(attention_trials(CPU)) == 2 * len(FORMS)


def test_a_sound_backend_is_chosen_anew_and_says_what_proved_it(planted):
    made = []

    def make() -> TorchOps:
        made.append(TorchOps())
        return made[-1]

    planted(make)
    choice = select.choose(CPU, prove=here)
    assert choice.ops is made[-1]
    assert len(made) == 2
    assert choice.reasons[0].startswith(f"planted: chosen; {len(trials(CPU))} trials as torch's in ")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.operation}: {fault.name}")
def test_a_backend_with_a_mistake_is_not_used(planted, fault):
    planted(lambda: fault.planted(TorchOps()))
    choice = select.choose(CPU, prove=here)
    assert isinstance(choice.ops, TorchOps)
    assert choice.reasons[0].startswith(f"planted: failed its start check: {fault.operation} (")
    assert choice.reasons[1] == "torch: chosen"


class Broken(TorchOps):
    def mla_decode(self, query, pages, batch, scale, value_size):
        raise OSError("ptxas: not found\nCommand failed with exit status 255")


def test_one_that_breaks_is_not_used_and_asked_for_by_name_it_is_an_error(planted):
    planted(Broken)
    why = r"planted: failed its start check: mla_decode \(.*\): OSError: Command failed with exit status 255"
    with pytest.raises(FailedPrecondition, match=why) as refusal:
        select.choose(CPU, "planted", prove=here)
    assert refusal.value.remedy
    assert isinstance(select.choose(CPU, prove=here).ops, TorchOps)


def test_only_the_operations_named_are_tried():
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
def test_a_backend_is_proved_in_a_process_of_its_own(name, failure):
    found = proof.prove_apart(f"{PLANTED}:{name}", CPU, PAGE_OPERATIONS)
    assert re.fullmatch(failure + ".*", found.failure)
    assert found.trials == (len(page_trials(CPU)) if name == "Sound" else 1 if name == "Wrong" else 0)


def test_a_backend_that_never_returns_ends_with_the_worker_that_tries_it():
    stop = threading.Event()
    timer = threading.Timer(0.5, stop.set)
    timer.start()
    assert proof.prove_apart(f"{PLANTED}:Hangs", CPU, PAGE_OPERATIONS, stop).failure == "it was stopped"
    assert multiprocessing.active_children() == []


def test_a_backend_that_never_returns_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(proof, "LIMIT_S", 0.5)
    assert proof.prove_apart(f"{PLANTED}:Hangs", CPU, PAGE_OPERATIONS).failure == "no end within 0 s"


def test_the_check_leaves_torchs_modes_as_they_were():
    before = torch.get_deterministic_debug_mode()
    assert proof.prove(Broken(), CPU).failure
    assert torch.get_deterministic_debug_mode() == before


def differences(tried: list[Trial]) -> list[str]:
    interpreter.quicken()
    ops, found = TritonOps(), []
    for trial in tried:
        found.append(proof.difference(trial, ops, TorchOps()))
    assert not ops.fallbacks, "kernels take every trial"
    return found


def test_kernels_pass_in_the_interpreter():
    tried = [*page_trials(CPU), *write_trials(CPU), attention_trials(CPU)[0]]
    assert differences(tried) == [""] * len(tried)


@pytest.mark.nightly
def test_kernels_pass_every_trial_in_the_interpreter():
    tried = list(trials(CPU))
    assert differences(tried) == [""] * len(tried)
