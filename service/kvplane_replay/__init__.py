"""A true engine over a session: requests of a trace are queued, prefilled in chunks, decoded, preempted and ended.

Nothing here computes a model. What the model would take is said by a cost model that moves a virtual clock, so two runs
of one trace are identical. Blocks, hits and preemptions are the service's answers; the engine counts them.
"""

from kvplane_replay.engine import Engine, StepSession
from kvplane_replay.fleet import Fleet, Progress
from kvplane_replay.plan import CostModel, EngineConfig, Routing, RunPlan
from kvplane_replay.requests import LiveRequest
from kvplane_replay.summary import Tally

__all__ = [
    "CostModel",
    "Engine",
    "EngineConfig",
    "Fleet",
    "LiveRequest",
    "Progress",
    "Routing",
    "RunPlan",
    "StepSession",
    "Tally",
]
