"""The engines that are followed, as the operator names them in a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import HashAlgorithm

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Address = Annotated[str, msgspec.Meta(pattern=r"^(tcp://.+:\d{1,5}|ipc://.+|inproc://.+)$", max_length=1024)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
GroupNumber = Annotated[int, msgspec.Meta(ge=0, le=63)]
MAX_PLACES = 4096


class PlaceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine, or one data parallel rank of it; or one replica of a kvplane service.

    Attributes:
        name: name of the place, in answers and metrics.
        service: addresses of the kvplane services, separated by commas, that have the replica of this name. Such a
            place needs only name and model: the service states everything else.
        events: address at which the engine publishes, such as tcp://engine-0:5557.
        replay: address of its replay socket; without one, every gap and connection clears the place.
        topic: topic at which it publishes.
        model: the model; a prompt is compared with places of its model only.
        hash_algorithms: the algorithms among which its keys are sought.
        hash_seed: seed of its keys; "" = the algorithm's default.
        attention_chunk: tokens of a chunk of chunked local attention, which no event states.
        draft_groups: groups in which a drafter (EAGLE, MTP) drops the last block of a hit.
        partial_hits: whether hits end inside blocks; by default where vLLM 0.33 would.
    """

    name: Text
    service: Text | None = None
    events: Address | None = None
    replay: Address | None = None
    topic: str = ""
    model: str = ""
    hash_algorithms: tuple[HashAlgorithm, ...] = tuple(HashAlgorithm)
    hash_seed: str = ""
    attention_chunk: Tokens | None = None
    draft_groups: tuple[GroupNumber, ...] = ()
    partial_hits: bool | None = None


class FleetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All places."""

    places: Annotated[tuple[PlaceSettings, ...], msgspec.Meta(max_length=MAX_PLACES)]


def load(path: Path) -> FleetSettings:
    """Read the file.

    Raises:
        InvalidArgument: it is not readable, or a value is wrong.
    """
    try:
        content = yaml.safe_load(path.read_bytes())
        settings = msgspec.convert(content, FleetSettings)
    except (OSError, yaml.YAMLError, UnicodeError, RecursionError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}", field="fleet", remedy="name a YAML file") from error
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{path}: {error}", field="places", remedy="see docs/fleet.md") from error
    for place in settings.places:
        if (place.service is None) == (place.events is None):
            raise InvalidArgument(
                f"{path}: place {place.name!r} has both `service` and `events`, or none",
                field="events",
                remedy="name the address of an engine's publisher, or of a kvplane service",
            )
    names = [place.name for place in settings.places]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgument(f"{path}: two places have the name {twice[0]!r}", field="name", remedy="rename one")
    return settings
