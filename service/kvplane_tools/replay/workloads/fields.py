"""The records of a trace: what each of their fields may be. Errors name the field, the value found, and the line."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError

from kvplane_tools.replay.workloads.lines import Line
from kvplane_tools.replay.workloads.requests import POSITIONS

_MAX_TIME = 10**15  # ms: 30,000 years

Count = Annotated[int, Field(strict=True, ge=0, le=POSITIONS)]
Length = Annotated[int, Field(strict=True, ge=1, le=POSITIONS)]  # in tokens
Time = Annotated[float, Field(strict=True, ge=0, le=_MAX_TIME)]  # in the unit of the trace

_Record = TypeVar("_Record", bound=BaseModel)


class MooncakeRequest(BaseModel):
    """A line of a Mooncake trace."""

    timestamp: Time
    input_length: Length
    output_length: Count
    hash_ids: list[Count]


class WekaRequest(BaseModel):
    """A request of a Weka session."""

    t: Time
    num_tokens: Length = Field(alias="in")
    out: Count
    hash_ids: list[Count]
    stop: Any = None


class WekaAgent(BaseModel):
    """A sub-agent of a Weka session, instead of a request."""

    t: Time
    requests: list[WekaRequest]


def _kind_of(entry: object) -> str:
    return "agent" if isinstance(entry, dict) and "requests" in entry else "request"


_Entry = Annotated[Annotated[WekaRequest, Tag("request")] | Annotated[WekaAgent, Tag("agent")], Discriminator(_kind_of)]


class WekaSession(BaseModel):
    """A line of a Weka trace. Only ids of the session's own scope can be replayed."""

    id: Annotated[str, Field(strict=True, min_length=1)]
    block_size: Length
    hash_id_scope: Literal["local"] = "local"
    requests: list[_Entry]


def parse(line: Line) -> dict[str, Any]:
    """Return the JSON object on a line. Raises MalformedTrace if it has none."""
    try:
        values = json.loads(line.text, parse_constant=_refuse_constant)
    except RecursionError:
        raise line.malformed("broken JSON: nested too deeply") from None
    except ValueError as error:
        raise line.malformed(f"broken JSON: {error}") from error
    if not isinstance(values, dict):
        raise line.malformed("the line is not a JSON object")
    return values


def read(kind: type[_Record], line: Line) -> _Record:
    """Return the record of this kind on a line. Raises MalformedTrace."""
    try:
        return kind.model_validate(parse(line))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = [one for one in first["loc"] if one not in ("request", "agent")]
        named = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in place).removeprefix(".")
        found = "" if first["type"] == "missing" else f"{_brief(first['input'])} is refused: "
        raise line.malformed(f"{named}: {found}{first['msg']}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
