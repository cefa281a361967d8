"""Owners: identities of callers, with the replicas and cache domains that each may use, its scopes (permitted methods)
and its limits.

The YAML file `auth_owners` maps the name of each owner to the owner's permissions. No two owners may register the same
replica name: otherwise a refused registration would reveal to one owner that the other one has a replica of that name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvplane.base.errors import InvalidArgument
from kvplane.base.settings_file import in_named_units, parse_yaml
from kvplane_service.auth.files import read_bytes
from kvplane_service.auth.scopes import Scope
from kvplane_service.config import reason_of

KEY = "auth_owners"
ALL = "*"  # at the end of a pattern: any name that begins with what precedes it
SUBJECT_KINDS = ("jwt:", "cert:")
_WORKING = frozenset(Scope) - {Scope.ADMIN}

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


def is_pattern(pattern: str) -> bool:
    """Return True if the text has no star, or one star at its end."""
    return ALL not in pattern[:-1]


def matches(pattern: str, name: str) -> bool:
    """Return True if the name equals the pattern, or begins with what precedes the star of the pattern."""
    return name.startswith(pattern[:-1]) if pattern.endswith(ALL) else name == pattern


def overlap(one: str, other: str) -> bool:
    """Return True if some name matches both patterns."""
    if one.endswith(ALL) and other.endswith(ALL):
        return one.startswith(other[:-1]) or other.startswith(one[:-1])
    return matches(one, other) if one.endswith(ALL) else matches(other, one)


class OwnerLimits(BaseModel):
    """Inclusive limits of one owner; None (null in YAML) = only the limits of the service apply."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_second: Count | None = None
    bytes_per_second: Count | None = 16 << 20  # of messages of sessions, which wait; of calls by their work (prices)
    concurrent_calls: Count | None = None  # including open sessions and subscriptions
    replicas: Count | None = None
    blocks: Count | None = None  # summed over the pools of its replicas
    retained_percent: Annotated[int, Field(ge=0, le=100)] = 25  # of the blocks of each pool, by Retain


class Owner(BaseModel):
    """An authenticated identity and its permissions.

    Attributes:
        scopes: sets of methods that the owner may call; by default all but `admin`.
        domains: patterns of the cache domains that its requests may use (requests share cached blocks only inside a
            domain); by default only the domain "".
        replicas: patterns of the replica names that the owner may register; by default NAME/*, where NAME is the
            owner's name.
        every_replica: the owner may use the replicas of all owners; meant for operators and monitoring.
        subjects: names in tokens (`jwt:SUB`) and certificates (`cert:NAME`) that identify the owner; by default the
            owner's own name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    scopes: frozenset[Scope] = _WORKING
    domains: tuple[str, ...] = ("",)
    replicas: tuple[str, ...] = ()
    every_replica: bool = False
    subjects: tuple[str, ...] = ()
    limits: OwnerLimits = OwnerLimits()

    @field_validator("domains", "replicas")
    @classmethod
    def _patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(is_pattern, value)):
            raise ValueError("`*` may stand only at the end of a name")
        return value

    @field_validator("subjects")
    @classmethod
    def _kinds(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(subject.startswith(SUBJECT_KINDS) for subject in value):
            raise ValueError("each subject must begin with `jwt:` or `cert:`")
        return value

    def may_name(self, replica: str) -> bool:
        """Return True if the owner may register a replica with this name."""
        return any(matches(pattern, replica) for pattern in self.replicas or (f"{self.name}/*",))

    def may_use(self, replica: str, registered_by: str) -> bool:
        """Return True if the owner may see the replica: it has `every_replica`, or it may register the name and the
        replica was registered by it or without authentication (`registered_by` is "").
        """
        return self.every_replica or (self.may_name(replica) and registered_by in (self.name, ""))

    def may_use_domain(self, domain: str) -> bool:
        """Return True if requests of the owner may use this cache domain (requests share cached blocks only inside
        one).
        """
        return any(matches(pattern, domain) for pattern in self.domains)


ANYONE = Owner(
    name="",
    scopes=frozenset(Scope),
    domains=(ALL,),
    replicas=(ALL,),
    every_replica=True,
    limits=OwnerLimits(bytes_per_second=None),
)


class Owners:
    """All owners of the file `auth_owners`."""

    def __init__(self, owners: Iterable[Owner]) -> None:
        """Index the owners. Raises InvalidArgument if two owners share a subject, or may register the same replica
        name.
        """
        self._by_name = {owner.name: owner for owner in owners}
        self._by_subject: dict[str, Owner] = {}
        for owner in self._by_name.values():
            for subject in owner.subjects or [kind + owner.name for kind in SUBJECT_KINDS]:
                first = self._by_subject.setdefault(subject, owner)
                if first is not owner:
                    raise _refused(
                        f"the owners {first.name} and {owner.name} both have the subject {subject}",
                        "give each subject to one owner",
                    )
        for one, other in combinations(self._by_name.values(), 2):
            _check_apart(one, other)

    def get(self, name: str) -> Owner | None:
        """Return the owner with this name, None if there is none."""
        return self._by_name.get(name)

    def of_subject(self, subject: str) -> Owner | None:
        """Return the owner with the subject `jwt:SUB` or `cert:NAME`, None if there is none."""
        return self._by_subject.get(subject)


def read_owners(path: str) -> Owners:
    """Read the file `auth_owners`. Raises NotFound, or InvalidArgument that names the owner and the key at fault."""
    try:
        content = parse_yaml(read_bytes(path, KEY))
    except ValueError as error:
        raise _refused(f"{path} is not YAML: {error}", "write lines of `owner: {key: value}`") from None
    if not isinstance(content, Mapping) or not content:
        raise _refused(f"{path} is not a mapping of owners", "write lines of `owner: {key: value}`")
    return Owners([_owner(str(name), fields) for name, fields in content.items()])


def _owner(name: str, fields: Any) -> Owner:  # noqa: ANN401 - what YAML holds
    if fields is not None and not isinstance(fields, Mapping):
        what = f"the value of owner {name} is a {type(fields).__name__}, not a mapping"
        raise _refused(what, "write `owner: {key: value}`")
    given = {str(key): value for key, value in (fields or {}).items()}
    if isinstance(limits := given.get("limits"), Mapping):
        given["limits"] = in_named_units(limits)
    try:
        return Owner(**{"name": name, **given})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (name, *first["loc"])))
        raise _refused(f"{where}: {reason_of(first)}", _remedy(first["type"], str(first["loc"][-1]))) from None


def _remedy(kind: str, key: str) -> str:
    keys = [key for key in (*Owner.model_fields, *OwnerLimits.model_fields) if key != "name"]
    if kind == "extra_forbidden":
        return f"the most similar key is {difflib.get_close_matches(key, keys, n=1, cutoff=0.0)[0]}"
    return "docs/operating/access.md shows every key with its values"


def _check_apart(one: Owner, other: Owner) -> None:
    for mine in one.replicas or (f"{one.name}/*",):
        for theirs in other.replicas or (f"{other.name}/*",):
            if overlap(mine, theirs):
                raise _refused(
                    f"the replica names {mine!r} of owner {one.name} and {theirs!r} of owner {other.name} overlap",
                    "give each owner its own names; set `every_replica: true` for operators",
                )


def _refused(what: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(what, field=KEY, remedy=remedy)
