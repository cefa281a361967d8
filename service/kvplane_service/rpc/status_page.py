"""The status page on the metrics port: static files, and the calls that read, as JSON over HTTP.

    GET  /                                    the page; /page.js, /draw.js, /page.css
    POST /api/Allocation/DescribeReplica      the RPC of this name, with request and answer as JSON

A call passes the same gate as over gRPC: an owner's bearer token in the header Authorization, its scopes, replicas and
limits, and the audit log. Without owners, `StatusPage._check` states where the page answers. No answer may be framed,
cached, or read by pages of other origins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from ipaddress import ip_address
from typing import Any

from google.protobuf.json_format import MessageToJson, Parse, ParseError
from google.protobuf.message import Message

from kvplane.base.errors import InvalidArgument, KvplaneError, PermissionDenied, Unauthenticated
from kvplane_service.auth.gate import CALL, Incoming
from kvplane_service.auth.identity import Proof
from kvplane_service.config import Config, is_local, is_open_to_all
from kvplane_service.rpc import prices
from kvplane_service.rpc.methods import CallHooks, UnaryMethod, with_replica
from kvplane_service.runtime.slices import Turns
from kvplane_service.telemetry.http import HttpRequest, HttpResponse

API = "/api/"
METHODS = (
    "Admin/Status",
    "Admin/ListRequests",
    "Admin/Explain",
    "Allocation/ListReplicas",
    "Allocation/DescribeReplica",
)
_PACKAGE = "kvplane.v1."
_MAX_CALLS = 64  # at a time
_JSON = "application/json"
_FILES = {"/": "index.html", "/page.js": "page.js", "/draw.js": "draw.js", "/page.css": "page.css"}
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_STATUS = {
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "PERMISSION_DENIED": HTTPStatus.FORBIDDEN,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
}


class StatusPage:
    """Answers the HTTP requests of the status page."""

    def __init__(self, methods: Mapping[str, UnaryMethod], hooks: CallHooks, config: Config) -> None:
        """`methods`: the handlers by full name; those of METHODS are served."""
        self._methods = {name: methods[f"{_PACKAGE}{name}"] for name in METHODS}
        self._hooks, self._config = hooks, config
        self._turns = Turns("calls of the status page", _MAX_CALLS)
        folder = files("kvplane_service.rpc") / "page"
        self._files = {path: (folder / name).read_bytes() for path, name in _FILES.items()}

    async def answer(self, request: HttpRequest) -> HttpResponse | None:
        """Return the answer to a request; None if its path is not one of the page."""
        if request.path in self._files:
            kind = _TYPES[_FILES[request.path].rpartition(".")[2]]
            return HttpResponse(HTTPStatus.OK, self._files[request.path], f"{kind}; charset=utf-8", _HEADERS)
        name = request.path.removeprefix(API)
        if name == request.path:
            return None
        if name not in self._methods or request.method != "POST":
            return HttpResponse(HTTPStatus.NOT_FOUND, b"{}", _JSON, _HEADERS)
        try:
            answer = await self._call(name, request)
        except KvplaneError as error:
            fields = {"reason": error.reason, "message": error.message, "field": error.field, "remedy": error.remedy}
            return _json(_STATUS.get(error.reason, HTTPStatus.SERVICE_UNAVAILABLE), fields)
        text = MessageToJson(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        return HttpResponse(HTTPStatus.OK, text.encode(), _JSON, _HEADERS)

    async def _call(self, name: str, request: HttpRequest) -> Message:
        """Call an RPC. Raises InvalidArgument for a body that is not its request, and what gate and RPC raise."""
        self._check(request)
        method, gate = self._methods[name], self._hooks.gate
        with self._turns.place():
            if gate is None:
                return await self._answered(method, request.body)
            proof = Proof((request.authorization,) if request.authorization else (), ())
            with gate.passing(Incoming(f"{_PACKAGE}{name}", request.peer, proof)):
                return await self._answered(method, request.body)

    async def _answered(self, method: UnaryMethod, body: bytes) -> Message:
        """Answer a call that was admitted: nothing of its body is parsed before, and it pays for the parser."""
        call = CALL.get()
        call.pay(prices.reserve(len(body)))
        try:
            raw = Parse(body, method.request_class()).SerializeToString()
        except (ParseError, UnicodeDecodeError) as error:
            what = f"the body is not a {method.request_class.DESCRIPTOR.name}: {error}"
            raise InvalidArgument(what, remedy="send its fields as JSON") from None
        call.count(prices.reserve(len(raw)) - prices.reserve(len(body)))
        answer = await with_replica(self._hooks.ensure_local, partial(method.answer, self._hooks, raw))
        return method.answer_class.FromString(answer)

    def _check(self, request: HttpRequest) -> None:
        """Raise an error unless the request may be answered; with owners, the gate decides.

        A form of another site cannot send JSON, and its scripts cannot read an answer. Without owners a name that
        resolves to this machine would make its pages ours, so only addresses and `localhost` are accepted as host.
        """
        config = self._config
        if request.content_type != _JSON:
            raise InvalidArgument("the body is not JSON", field="content-type", remedy=f"send {_JSON}")
        if config.auth_owners:
            return
        if config.metrics_token_file:
            if not request.may_scrape:
                raise Unauthenticated("the token is missing or wrong", remedy="send the token of metrics_token_file")
            return
        if not (is_local(config.metrics_listen) or is_open_to_all(config)):
            raise PermissionDenied(
                "the page shows nothing here: this port is open to other machines, and the service to none",
                field="metrics_listen",
                remedy="set auth_owners or metrics_token_file, or bind metrics_listen to 127.0.0.1",
            )
        if not _is_address(request.host):
            what = f"the host {request.host[:140]!r} is a name, and the service has no owners"
            raise PermissionDenied(what, field="host", remedy="open the page by an IP address, or set auth_owners")


def _is_address(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return name == "localhost"
    return True


def _json(status: HTTPStatus, fields: dict[str, Any]) -> HttpResponse:
    return HttpResponse(status, json.dumps(fields).encode(), _JSON, _HEADERS)
