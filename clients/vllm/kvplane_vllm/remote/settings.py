"""The options of mode "remote", and the features of vLLM that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvplane.base.errors import InvalidArgument
from kvplane_vllm.target import Target, target_of

STEP_TIMEOUT_S = 5.0
REMEDY = "use mode: mirror for this feature"

# What a program of rows cannot express: (feature, whether vLLM's config has it).
REFUSED: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("pipeline parallelism", lambda one: one.parallel_config.pipeline_parallel_size > 1),
    ("prefill context parallelism", lambda one: getattr(one.parallel_config, "prefill_context_parallel_size", 1) > 1),
    ("an encoder cache connector", lambda one: one.ec_transfer_config),
    ("output of auxiliary data", lambda one: one.aux_output_config.enabled),
    ("a diffusion model", lambda one: one.model_config.is_diffusion),
    ("an encoder-decoder model", lambda one: one.model_config.is_encoder_decoder),
    ("a prefill interval", lambda one: one.scheduler_config.prefill_schedule_interval > 1),
    ("prefill lookahead (multi-module MTP)", lambda one: one.num_prefill_lookahead_tokens > 1),
)
# The same, of vLLM's scheduler.
REFUSED_OF_SCHEDULER: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("bounded replay of a sliding window", lambda one: one.prefix_replay_tokens),
    ("a KV connector", lambda one: one.connector),
)
# With these the next step cannot be asked for before the running one has ended.
SYNCHRONOUS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("speculative decoding", lambda one: one.num_speculative_tokens),
    ("data parallelism", lambda one: one.parallel_config.data_parallel_size > 1),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Which service decides, and how the engine asks it.

    Attributes:
        target: the service, and the engine's replica there.
        pipeline: whether the program of a step is sent while the step before it runs.
        step_timeout_s: how long a schedule() waits for an answer.
        session_socket: path of the service's session socket; "" = the session uses gRPC.
    """

    target: Target
    pipeline: bool = True
    step_timeout_s: float = STEP_TIMEOUT_S
    session_socket: str = ""


def settings_of(chosen: Mapping[str, Any]) -> Settings:
    """Return the settings of these options, which were checked."""
    timeout_s = float(chosen.get("step_timeout", STEP_TIMEOUT_S))
    pipeline, local = chosen.get("pipeline", "on") == "on", chosen.get("session_socket", "")
    return Settings(target_of(chosen), pipeline, timeout_s, local)


def refuse(config: Any) -> None:
    """Raise InvalidArgument for a feature of this config of vLLM that mode "remote" does not support."""
    _refuse(config, REFUSED)


def refuse_scheduler(scheduler: Any) -> None:
    """Raise InvalidArgument for a feature of this scheduler of vLLM that mode "remote" does not support."""
    _refuse(scheduler, REFUSED_OF_SCHEDULER)


def _refuse(subject: Any, table: tuple[tuple[str, Callable[[Any], Any]], ...]) -> None:
    for feature, has in table:
        if has(subject):
            raise InvalidArgument(f"{feature} is not supported in mode remote", field="mode", remedy=REMEDY)


def why_synchronous(config: Any) -> str:
    """Return the feature that needs each step's tokens before the next step is asked for; "" if there is none."""
    return next((feature for feature, has in SYNCHRONOUS if has(config)), "")
