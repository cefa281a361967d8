"""A table of owners in one key of etcd, replaced by compare-and-set, over etcd's JSON gateway.

The version is the key's mod_revision: no revision of a cluster is used twice, also if the key is deleted.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

from kvplane_service.store.errors import STORE_ERRORS, StoreUnavailable
from kvplane_service.store.interface import Stored
from kvplane_service.store.json_api import JsonApi

SCHEME = "etcd:"
_FIELD = "ownership"


class EtcdTable:
    """Implements OwnerTable with the members of a cluster: a call that fails at one is repeated at the next, later."""

    def __init__(self, members: Sequence[JsonApi], key: str) -> None:
        self._members = list(members)
        self._key = b64encode(key.encode()).decode()

    async def read(self) -> Stored:
        """Return the value of the key (see OwnerTable.read)."""
        answer = await self._call("/v3/kv/range", {"key": self._key})  # linearizable, unless `serializable` is stated
        found = answer.get("kvs")
        if not found:
            return Stored(b"", None)
        try:
            return Stored(b64decode(found[0].get("value", "")), str(int(found[0]["mod_revision"])))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            raise StoreUnavailable("the answer is not a range", field=_FIELD, remedy="check the server") from None

    async def replace(self, version: str | None, raw: bytes) -> bool:
        """Replace the value if the key was last changed in this revision (see OwnerTable.replace)."""
        compared = {"key": self._key, "target": "MOD", "result": "EQUAL", "mod_revision": version or "0"}
        put = {"request_put": {"key": self._key, "value": b64encode(raw).decode()}}
        answer = await self._call("/v3/kv/txn", {"compare": [compared], "success": [put]})
        return answer.get("succeeded") is True

    async def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return (await self._members[0].call("POST", path, body, expected=())).body
        except STORE_ERRORS:
            self._members.append(self._members.pop(0))
            raise
