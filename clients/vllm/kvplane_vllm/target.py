"""The service of an engine: its address, the engine's replica there, and how calls to it are protected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvplane.base.errors import InvalidArgument
from kvplane.rpc.access import PLAIN, Access, Tls

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FIELD = "additional_config.kvplane"
MODEL_NAME = "model_name"  # not an option: what vLLM serves the model as
DP_RANK = "{dp_rank}"  # in the options `replica` and `worker`
FIXED_HASHES = ("sha256", "sha256_cbor")  # equal in all processes
SYSTEM = "system"  # as `tls_ca`: the certificate authorities of this machine
ACCESS = ("tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file")  # the options of `access_of`


@dataclass(frozen=True, slots=True)
class Target:
    """The service, the name of the engine's replica there, TLS and token, and the name of the model for operators."""

    address: str
    replica: str
    access: Access = PLAIN
    model_name: str = ""


def target_of(chosen: Mapping[str, str], field: str = FIELD) -> Target:
    """Return the service of these options, which were checked; `field` has them. Raises as `access_of`."""
    return Target(chosen["address"], chosen["replica"], access_of(chosen, field), chosen.get(MODEL_NAME, ""))


def access_of(chosen: Mapping[str, str], field: str = FIELD) -> Access:
    """Return TLS and token of these options. Raises InvalidArgument if they contradict each other, and NotFound for a
    file that cannot be read: an engine without its credentials is refused at the start.
    """
    ca, cert, key, server_name, token = (chosen.get(name, "") for name in ACCESS)
    if not ca and (cert or key or server_name):
        remedy = f"also give tls_ca: a file, or {SYSTEM!r} for the certificate authorities of this machine"
        raise InvalidArgument("TLS is not switched on", field=f"{field}.tls_ca", remedy=remedy)
    tls = Tls("" if ca == SYSTEM else ca, cert, key, server_name) if ca else None
    access = Access(tls, Path(token) if token else "")
    for address in chosen.get("address", "").split(","):
        access.check(address.strip())
    if tls is not None:
        tls.credentials()
    if token:
        access.metadata()
    return access


def shown(name: str) -> str:
    """Return a name as the service accepts it, the end of a long path; "" for one that cannot be shown."""
    return name[-256:] if name.isprintable() else ""


def of_rank(config: VllmConfig, given: dict[str, str], field: str = FIELD) -> dict[str, str]:
    """Return the options of this rank of data parallelism: each rank is an engine with a replica and pages of its own.

    vLLM gives the ranks of a dense model a size of 1, and all of them their number. Raises InvalidArgument for a name
    that all ranks would share.
    """
    parallel = config.parallel_config
    places, rank = [name for name in ("replica", "worker") if name in given], parallel.data_parallel_index
    for name in places:
        if DP_RANK not in given[name] and (rank or parallel.data_parallel_size > 1):
            problem = f"{given[name]} would be shared by all ranks of data parallelism"
            raise InvalidArgument(problem, field=f"{field}.{name}", remedy=f"write {DP_RANK} where their number goes")
    return given | {name: given[name].replace(DP_RANK, str(rank)) for name in places}
