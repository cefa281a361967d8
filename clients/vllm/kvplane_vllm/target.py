"""The service of an engine: its address, the engine's replica there, and how calls to it are protected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvplane.base.errors import InvalidArgument
from kvplane.rpc.access import PLAIN, Access, Tls

FIELD = "additional_config.kvplane"
MODEL_NAME = "model_name"  # not an option: what vLLM serves the model as
SYSTEM = "system"  # as `tls_ca`: the certificate authorities of this machine
ACCESS = ("tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file")  # the options of `access_of`


@dataclass(frozen=True, slots=True)
class Target:
    """The service, the name of the engine's replica there, TLS and token, and the name of the model for operators."""

    address: str
    replica: str
    access: Access = PLAIN
    model_name: str = ""


def target_of(chosen: Mapping[str, str]) -> Target:
    """Return the service of these options, which were checked."""
    return Target(chosen["address"], chosen["replica"], access_of(chosen), chosen.get(MODEL_NAME, ""))


def access_of(chosen: Mapping[str, str]) -> Access:
    """Return TLS and token of these options. Raises InvalidArgument if they contradict each other, and NotFound for a
    file that cannot be read: an engine without its credentials is refused at the start.
    """
    ca, cert, key, server_name, token = (chosen.get(name, "") for name in ACCESS)
    if not ca and (cert or key or server_name):
        remedy = f"also give tls_ca: a file, or {SYSTEM!r} for the certificate authorities of this machine"
        raise InvalidArgument("TLS is not switched on", field=f"{FIELD}.tls_ca", remedy=remedy)
    tls = Tls("" if ca == SYSTEM else ca, cert, key, server_name) if ca else None
    access = Access(tls, Path(token) if token else "")
    for address in chosen.get("address", "").split(","):
        access.check(address.strip())
    if tls is not None:
        tls.credentials()
    if token:
        access.metadata()
    return access
