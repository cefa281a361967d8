"""Owners: which replicas and domains each may use, with which scopes and limits.

The file `auth_owners` is YAML, from an owner's name to its permissions. Two owners may not use the same replica name:
whether it is taken would reveal one owner's replicas to the other.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvplane.base.errors import InvalidArgument
from kvplane_service.auth.files import read_bytes
from kvplane_service.auth.scopes import Scope

KEY = "auth_owners"
ALL = "*"  # at the end of a pattern: any name that begins with what precedes it
SUBJECT_KINDS = ("jwt:", "cert:")
_WORKING = frozenset(Scope) - {Scope.ADMIN}

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


def is_pattern(pattern: str) -> bool:
    """Whether a star appears only at the end."""
    return ALL not in pattern[:-1]


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern covers the name."""
    return name.startswith(pattern[:-1]) if pattern.endswith(ALL) else name == pattern


def overlap(one: str, other: str) -> bool:
    """Whether some name matches both."""
    if one.endswith(ALL) and other.endswith(ALL):
        return one.startswith(other[:-1]) or other.startswith(one[:-1])
    return matches(one, other) if one.endswith(ALL) else matches(other, one)


class OwnerLimits(BaseModel):
    """Inclusive limits; None = only the limits of the service."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_second: Count | None = None
    concurrent_calls: Count | None = None  # including open sessions and subscriptions
    replicas: Count | None = None
    blocks: Count | None = None  # summed over the pools of its replicas


class Owner(BaseModel):
    """An authenticated identity and its permissions.

    Attributes:
        scopes: all but admin by default.
        domains: domains of its requests; by default only the empty one.
        replicas: names that it may register; NAME/* by default.
        every_replica: it may use the replicas of all owners; for operators and monitoring.
        subjects: its names in tokens and certificates, `jwt:SUB` or `cert:NAME`; its own name by default.
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
            raise ValueError("a star is allowed only at the end of a name")
        return value

    @field_validator("subjects")
    @classmethod
    def _kinds(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(subject.startswith(SUBJECT_KINDS) for subject in value):
            raise ValueError("write jwt:SUB or cert:NAME")
        return value

    def may_name(self, replica: str) -> bool:
        """Whether it may register a replica with this name."""
        return any(matches(pattern, replica) for pattern in self.replicas or (f"{self.name}/*",))

    def may_use(self, replica: str, registered_by: str) -> bool:
        """Whether it may see a replica: one that it registered, or one registered without authentication."""
        return self.every_replica or (self.may_name(replica) and registered_by in (self.name, ""))

    def may_use_domain(self, domain: str) -> bool:
        """Whether its requests may use this domain."""
        return any(matches(pattern, domain) for pattern in self.domains)


ANYONE = Owner(name="", scopes=frozenset(Scope), domains=(ALL,), replicas=(ALL,), every_replica=True)


class Owners:
    """The owners of a file."""

    def __init__(self, owners: Iterable[Owner]) -> None:
        """Raises InvalidArgument for a subject or a replica name that two owners share."""
        self._by_name = {owner.name: owner for owner in owners}
        self._by_subject: dict[str, Owner] = {}
        for owner in self._by_name.values():
            for subject in owner.subjects or [kind + owner.name for kind in SUBJECT_KINDS]:
                first = self._by_subject.setdefault(subject, owner)
                if first is not owner:
                    raise _refused(f"{subject} is {first.name} and {owner.name}", "name each subject once")
        for one, other in combinations(self._by_name.values(), 2):
            _check_apart(one, other)

    def get(self, name: str) -> Owner | None:
        """The owner of this name."""
        return self._by_name.get(name)

    def of_subject(self, subject: str) -> Owner | None:
        """The owner with the subject `jwt:SUB` or `cert:NAME`."""
        return self._by_subject.get(subject)


def read_owners(path: str) -> Owners:
    """Read the file. Raises NotFound, InvalidArgument naming the owner and its key."""
    try:
        content = yaml.safe_load(read_bytes(path, KEY))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _refused(f"{path} is not YAML: {error}", "write lines of `owner: {key: value}`") from None
    if not isinstance(content, Mapping) or not content:
        raise _refused(f"{path} has no owners", "write lines of `owner: {key: value}`")
    return Owners([_owner(str(name), fields) for name, fields in content.items()])


def _owner(name: str, fields: Any) -> Owner:  # noqa: ANN401 - what YAML holds
    if fields is not None and not isinstance(fields, Mapping):
        raise _refused(f"{name} is not a mapping", "write `owner: {key: value}`")
    try:
        return Owner(**{"name": name, **{str(key): value for key, value in (fields or {}).items()}})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (name, *first["loc"])))
        raise _refused(f"{where}: {first['msg']}", _remedy(first["type"], str(first["loc"][-1]))) from None


def _remedy(kind: str, key: str) -> str:
    keys = [key for key in (*Owner.model_fields, *OwnerLimits.model_fields) if key != "name"]
    if kind == "extra_forbidden":
        return f"the nearest key is {difflib.get_close_matches(key, keys, n=1, cutoff=0.0)[0]}"
    return "docs/operating.md shows every key"


def _check_apart(one: Owner, other: Owner) -> None:
    for mine in one.replicas or (f"{one.name}/*",):
        for theirs in other.replicas or (f"{other.name}/*",):
            if overlap(mine, theirs):
                raise _refused(
                    f"{one.name} may use {mine!r} and {other.name} {theirs!r}, which overlap",
                    "give each owner its own names; `every_replica: true` is for operators",
                )


def _refused(what: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(what, field=KEY, remedy=remedy)
