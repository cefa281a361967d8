"""The four models: headers of recorded traces with larger pools, which both sides read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kvplane.base.groups import AlignSpec, CommitRule, HashAlgorithm, ReplicaSpec
from tests.bench.peer.work import MAX_MODEL_LEN, Shape
from tests.conformance.forms import Record
from tests.conformance.header import read_records, trace_spec

TRACES = Path(__file__).parents[2] / "conformance" / "traces"


@dataclass(frozen=True, slots=True)
class Model:
    """One model.

    Attributes:
        name: for people.
        trace: the recording whose header describes it.
        num_groups: as a check of that header.
    """

    name: str
    trace: str
    num_groups: int

    def header(self, num_blocks: int) -> Record:
        """Arguments of the reference's manager: statistics off, events on."""
        header = next(read_records(TRACES / f"{self.trace}.jsonl.gz"))
        assert len(header["groups"]) == self.num_groups, self.trace
        args = header["manager_args"] | {
            "max_model_len": MAX_MODEL_LEN,
            "max_in_flight_tokens": MAX_MODEL_LEN,
            "log_stats": False,
            "enable_kv_cache_events": True,
        }
        return header | {"num_blocks": num_blocks, "manager_args": args}

    def spec(self, num_blocks: int) -> ReplicaSpec:
        """The kvplane replica: commit=safe and the kvplane hash, the defaults; events on as in the header."""
        header = self.header(num_blocks)
        known = header | {"manager_args": header["manager_args"] | {"log_stats": True}}
        spec = trace_spec(known)
        align = AlignSpec(self.shape.unit, MAX_MODEL_LEN) if self.shape.has_states else AlignSpec()
        return replace(spec, commit=CommitRule.SAFE, hash_algorithm=HashAlgorithm.KVPLANE, hash_seed="", align=align)

    @property
    def shape(self) -> Shape:
        """The properties that determine the work."""
        groups = self.header(2)["groups"]
        (unit,) = {group["block_size"] for group in groups}
        return Shape(unit, self.num_groups, any(group["mamba_cache_mode"] for group in groups))


MODELS = (
    Model("Llama-3.1-70B", "llama-full-b1200-s1", 1),
    Model("gpt-oss-20b", "gpt-oss-b900-s21", 2),
    Model("Gemma-3-27B", "gemma3-7groups-b700-s31", 7),
    Model("Jamba-v0.1", "jamba-align-b400-s61", 8),
)
