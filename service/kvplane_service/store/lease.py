"""A table of owners in an annotation of one Kubernetes Lease (coordination.k8s.io/v1), replaced by compare-and-set.

The version is the Lease's uid and resourceVersion, and an update states both. Without the uid, an update of a Lease
that was deleted would create it again with what it had. The Lease is created by PUT too: RBAC can permit that for one
name, and a POST only for all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvplane.base.errors import InvalidArgument
from kvplane_service.store.errors import StoreForeign, StoreUnavailable
from kvplane_service.store.interface import Stored
from kvplane_service.store.json_api import Endpoint, JsonApi

ANNOTATION = "kvplane/owners"
HOLDER = "kvplane"  # what `kubectl get lease` shows; the owners are in the annotation
SCHEME = "lease:"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NAME = re.compile(r"(?:([a-z0-9-]{1,63})/)?([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)")
_FIELD = "ownership"


def endpoint(environment: Mapping[str, str], ca: str = "", token: str = "") -> Endpoint:
    """Return the API server of the pod's cluster. `ca` and `token` are files; "" = those of the pod's service account.
    Raises InvalidArgument outside of a cluster.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        what = f"a `{SCHEME}` needs a cluster, and KUBERNETES_SERVICE_HOST is not set"
        raise InvalidArgument(what, field=_FIELD, remedy="set `store` outside of Kubernetes")
    host = f"[{host}]" if ":" in host else host
    files = {"ca": ca or str(ACCOUNT / "ca.crt"), "token": token or str(ACCOUNT / "token")}
    return Endpoint(f"https://{host}:{port}", **files)


def path_of(name: str, account: Path = ACCOUNT) -> tuple[str, str]:
    """Return the namespace and name in `lease:[NAMESPACE/]NAME`; the namespace is by default the pod's. Raises
    InvalidArgument.
    """
    match = _NAME.fullmatch(name.removeprefix(SCHEME))
    if match is None:
        what = f"{name!r} does not name a Lease"
        raise InvalidArgument(what, field=_FIELD, remedy="write lease:NAME or lease:NAMESPACE/NAME")
    try:
        return match[1] or (account / "namespace").read_text("ascii")[:64].strip(), match[2]
    except (OSError, ValueError) as error:
        what = f"the namespace of this pod cannot be read: {error}"
        raise InvalidArgument(what, field=_FIELD, remedy="write lease:NAMESPACE/NAME") from None


class LeaseTable:
    """Implements OwnerTable."""

    def __init__(self, api: JsonApi, namespace: str, name: str, lease_ms: int) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._seconds = max(1, -(-lease_ms // 1000))
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        self._read: tuple[str, dict[str, Any]] = "", {}

    async def read(self) -> Stored:
        """Return the annotation (see OwnerTable.read). Raises StoreForeign if the Lease is of another program."""
        answer = await self._api.call("GET", self._path, None, expected=(404,))
        if answer.status == 404:
            return Stored(b"", None)
        metadata = _of(answer.body, "metadata")
        version = f"{metadata.get('uid', '')} {metadata.get('resourceVersion', '')}"
        if version.startswith(" ") or version.endswith(" "):
            raise StoreUnavailable("the answer is not a Lease", field=_FIELD, remedy="check the API server")
        raw = _of(metadata, "annotations").get(ANNOTATION, "")
        holder = _of(answer.body, "spec").get("holderIdentity") or HOLDER
        if not raw and holder != HOLDER:
            what = f"the Lease {self._namespace}/{self._name} is that of {str(holder)[:100]}"
            raise StoreForeign(what, field=_FIELD, remedy="name another Lease; nothing was changed")
        self._read = version, answer.body
        return Stored(str(raw).encode(), version)

    async def replace(self, version: str | None, raw: bytes) -> bool:
        """Replace the annotation (see OwnerTable.replace). What others wrote into the Lease stays."""
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        spec: dict[str, Any] = {}
        if version is not None:
            last, found = self._read
            if version != last:
                return False
            metadata, spec = dict(_of(found, "metadata")), dict(_of(found, "spec"))
            metadata.pop("managedFields", None)
        metadata["annotations"] = {**_of(metadata, "annotations"), ANNOTATION: raw.decode()}
        spec |= {"holderIdentity": HOLDER, "leaseDurationSeconds": self._seconds}
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        # 409: another version, or another uid; 404: it is being deleted; 422: it exists, and no version was stated.
        answer = await self._api.call("PUT", self._path, body, expected=(404, 409, 422))
        return answer.status < 300


def _of(owner: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = owner.get(key)
    return found if isinstance(found, dict) else {}
