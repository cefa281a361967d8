"""Decide which steps and calls are traced, before the tracing library is called, so that untraced steps cost nothing.

Configured by the standard variables OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG. One default differs from the
standard, which traces every call without a trace context: here one in a hundred of them is traced, because an engine
may send hundreds of steps per second.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvplane.base.errors import InvalidArgument
from kvplane.base.trace import is_sampled

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DEFAULT = "parentbased_traceidratio"
_DEFAULT_RATIO = "0.01"
_RATIO_OF = {"always_on": 1.0, "always_off": 0.0, "traceidratio": None}
_PARENT = "parentbased_"


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Return True if the environment enables traces. Raises InvalidArgument for an unsupported exporter or protocol."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "")
    if exporter not in ("", "none", "otlp"):
        what = f"the exporter {exporter!r} is not supported"
        raise InvalidArgument(what, field="OTEL_TRACES_EXPORTER", remedy="use otlp or none")
    wanted = exporter == "otlp" or (not exporter and any(environment.get(name) for name in _ENDPOINTS))
    protocol = next((name for name in _PROTOCOLS if environment.get(name, "grpc") != "grpc"), None)
    if wanted and protocol is not None:
        raise InvalidArgument(
            f"the protocol {environment[protocol]!r} is not supported",
            field=protocol,
            remedy="use grpc, and the collector's port for gRPC (4317)",
        )
    return wanted


class Sampling:
    """Decides which calls and steps are traced: by the `sampled` flag of the parent trace context, or evenly spaced.

    Args:
        by_parent: if True, the flag decides for calls and steps that have a trace context.
        ratio: traced share (0 to 1) of the calls and steps without a trace context; of all if `by_parent` is False.
    """

    def __init__(self, by_parent: bool, ratio: float) -> None:
        self._by_parent = by_parent
        self._ratio = ratio
        self._due = 0.0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Sampling:
        """Return the sampling that the environment configures. Raises InvalidArgument that names the invalid
        variable.
        """
        name = environment.get("OTEL_TRACES_SAMPLER") or _DEFAULT
        inner = name.removeprefix(_PARENT)
        if inner not in _RATIO_OF:
            known = ", ".join([*_RATIO_OF, *(_PARENT + one for one in _RATIO_OF)])
            what = f"the sampler {name!r} is unknown"
            raise InvalidArgument(what, field="OTEL_TRACES_SAMPLER", remedy=f"use one of {known}")
        ratio = _RATIO_OF[inner]
        return cls(name != inner, _ratio(environment) if ratio is None else ratio)

    def takes(self, traceparent: str) -> bool:
        """Return True if a call or step with this trace context ("" = none) is to be traced."""
        if traceparent and self._by_parent:
            return is_sampled(traceparent)
        self._due += self._ratio
        if self._due < 1.0:
            return False
        self._due -= 1.0
        return True


def _ratio(environment: Mapping[str, str]) -> float:
    text = environment.get("OTEL_TRACES_SAMPLER_ARG") or _DEFAULT_RATIO
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        what = f"{text!r} is not a number from 0 to 1"
        raise InvalidArgument(what, field="OTEL_TRACES_SAMPLER_ARG", remedy="give the traced share, 0 to 1")
    return ratio
