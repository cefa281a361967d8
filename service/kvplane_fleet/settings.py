"""The engines that are followed, as the operator names them in a YAML file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import HashAlgorithm
from kvplane.base.settings_file import in_named_units, parse_yaml
from kvplane_fleet.policies import Policy

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Address = Annotated[str, msgspec.Meta(pattern=r"^(tcp://.+:\d{1,5}|ipc://.+|inproc://.+)$", max_length=1024)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
GroupNumber = Annotated[int, msgspec.Meta(ge=0, le=63)]
MAX_PLACES = 4096
MAX_NAMES = 1024  # of models, of one place


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
        aliases: other names under which the engine serves it.
        adapters: its LoRA adapters, each a model of its own: the path from which the engine loaded it, by name.
        hash_algorithms: the algorithms among which its keys are sought; SGLang's always is one.
        hash_seed: seed of its keys; "" = the algorithm's default.
        attention_chunk: tokens of a chunk of chunked local attention, which no event states.
        draft_groups: groups in which a drafter (EAGLE, MTP) drops the last block of a hit.
        partial_hits: whether hits end inside blocks; by default where vLLM 0.33 would.
        endpoint: address to which requests are sent; answers repeat it.
        num_blocks: blocks of the engine; by default the most that it was seen to have when it evicted.
    """

    name: Text
    service: Text | None = None
    events: Address | None = None
    replay: Address | None = None
    topic: str = ""
    model: str = ""
    aliases: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_NAMES)] = ()
    adapters: Annotated[dict[Text, Text], msgspec.Meta(max_length=MAX_NAMES)] = msgspec.field(default_factory=dict)
    hash_algorithms: tuple[HashAlgorithm, ...] = tuple(HashAlgorithm)
    hash_seed: str = ""
    attention_chunk: Tokens | None = None
    draft_groups: tuple[GroupNumber, ...] = ()
    partial_hits: bool | None = None
    endpoint: str = ""
    num_blocks: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0


class RouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the router decides.

    Attributes:
        policy: the policy of requests that name none.
        prefill_tokens_per_s, decode_s: what is assumed of an engine that nothing was reported of: prompt tokens that it
            computes in a second, and seconds for one token of each prompt in flight.
        host_tokens_per_s, disk_tokens_per_s, peer_tokens_per_s: tokens that an engine loads in a second from its host
            memory, from disk, from the host memory of its peers.
        price_displacement: count what an engine has to evict for a prompt.
        max_decisions: booked prompts at a time.
        max_body_bytes: of all HTTP requests whose engine is not chosen yet, at the endpoint picker.
        forget_after_s: time after which a booked prompt that no client reports on counts as ended.
        probe_period_s: time after which an engine with an endpoint is asked again for a prompt that it was sent, with
            one output token, to compare the cached tokens that it states with the claim; 0 = never.
        probe_tokens: most tokens that it should compute for such a probe.
        warm_up_s: time after which the router is ready although it has not yet learned what some engine has.
    """

    policy: Policy = Policy.COST
    prefill_tokens_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 10_000.0
    decode_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 0.02
    host_tokens_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 200_000.0
    disk_tokens_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 20_000.0
    peer_tokens_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 100_000.0
    price_displacement: bool = True
    max_decisions: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1 << 16
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1 << 20, le=1 << 40)] = 64 << 20
    forget_after_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 600.0
    probe_period_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    probe_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 512
    warm_up_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 10.0


class FleetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All places, and how the router decides among them."""

    places: Annotated[tuple[PlaceSettings, ...], msgspec.Meta(max_length=MAX_PLACES)]
    router: RouterSettings = RouterSettings()


def load(path: Path) -> FleetSettings:
    """Read the file.

    Raises:
        InvalidArgument: it is not readable, or a value is wrong.
    """
    try:
        content = parse_yaml(path.read_bytes())
        if isinstance(content, dict) and isinstance(content.get("router"), dict):
            content["router"] = in_named_units(content["router"])
        settings = msgspec.convert(content, FleetSettings)
    except (msgspec.ValidationError, ValueError) as error:
        remedy = "see docs/fleet.md; put names that YAML reads as numbers or dates in quotation marks"
        what = f"{path}: {error}" if isinstance(error, msgspec.ValidationError) else f"{path} cannot be read: {error}"
        raise InvalidArgument(what, field="places", remedy=remedy) from error
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error}", field="fleet", remedy="name a YAML file") from error
    for place in settings.places:
        if (place.service is None) == (place.events is None):
            raise InvalidArgument(
                f"{path}: place {place.name!r} has both `service` and `events`, or none",
                field="events",
                remedy="name the address of an engine's publisher, or of a kvplane service",
            )
        models = Counter([place.model, *place.aliases, *place.adapters])
        if repeated := [model for model, times in models.items() if times > 1]:
            raise InvalidArgument(
                f"{path}: place {place.name!r} names {repeated[0]!r} twice as a model",
                field="adapters",
                remedy="give model, aliases and adapters different names",
            )
    names = [place.name for place in settings.places]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgument(f"{path}: two places have the name {twice[0]!r}", field="name", remedy="rename one")
    return settings
