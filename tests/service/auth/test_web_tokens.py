"""JSON Web Tokens: every way to forge one, and keys that change under load."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kvplane.base.errors import InvalidArgument, PermissionDenied, Unauthenticated
from kvplane.v1 import admin_pb2
from kvplane_service.auth.web_tokens import LEEWAY_S, MAX_TOKEN_CHARS, read_web_tokens
from tests.service.guarded import Caller, Guard, replace
from tests.service.rig import refusal, running

ISSUER, AUDIENCE = "https://issuer.test", "kvplane"
RSA_KEY = rsa.generate_private_key(65537, 2048)
WEAK_RSA_KEY = rsa.generate_private_key(65537, 1024)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
STATUS = admin_pb2.StatusRequest()


def public(key: Any, kid: str, **more: str) -> dict[str, Any]:
    algorithm = {rsa.RSAPrivateKey: "RS256", ec.EllipticCurvePrivateKey: "ES256"}
    name = next((name for kind, name in algorithm.items() if isinstance(key, kind)), "EdDSA")
    made = jwt.get_algorithm_by_name(name).to_jwk(key.public_key())
    return {**(json.loads(made) if isinstance(made, str) else made), "kid": kid, **more}


def claims(**more: Any) -> dict[str, Any]:
    now = time.time()
    made = {"sub": "acme", "iss": ISSUER, "aud": AUDIENCE, "exp": now + 3600, **more}
    return {key: value for key, value in made.items() if value is not None}


def token(key: Any = RSA_KEY, kid: str | None = "rsa", algorithm: str = "RS256", **more: Any) -> str:
    return jwt.encode(claims(**more), key, algorithm, headers={"kid": kid} if kid else None)


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "jwks"
    path.write_text(json.dumps({"keys": [public(RSA_KEY, "rsa"), public(EC_KEY, "ec"), public(ED_KEY, "ed")]}))
    return path


@pytest.fixture
def checked(keys):
    return read_web_tokens(str(keys), ISSUER, AUDIENCE)


@pytest.mark.parametrize(
    "good",
    [
        token(),
        token(EC_KEY, "ec", "ES256"),
        token(ED_KEY, "ed", "EdDSA"),
        token(aud=["other", AUDIENCE]),
        token(nbf=time.time() - 1),
    ],
)
def test_a_valid_token_has_its_subject(checked, good):
    found = checked.check(good)
    assert found.subject == "acme"
    assert found.expires_s > time.time()


def b64(content: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


def unsigned(header: dict[str, Any]) -> str:
    return f"{b64({'kid': 'rsa', **header})}.{b64(claims())}."


def with_claims(made: str, **more: Any) -> str:
    header, _, signature = made.split(".")
    return f"{header}.{b64(claims(**more))}.{signature}"


PUBLIC_PEM = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def signed_with_the_public_key() -> str:
    """An HMAC with public data instead of the signature."""
    body = f"{b64({'kid': 'rsa', 'alg': 'HS256', 'typ': 'JWT'})}.{b64(claims())}"
    mac = hmac.new(PUBLIC_PEM, body.encode(), hashlib.sha256).digest()
    return f"{body}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


FORGED = {
    "alg none": unsigned({"alg": "none"}),
    "alg None": unsigned({"alg": "None"}),
    "no alg": unsigned({}),
    "the public key as a secret": signed_with_the_public_key(),
    "another key of that kind": token(rsa.generate_private_key(65537, 2048)),
    "another algorithm of that key": token(algorithm="PS256"),
    "the kid of another kind of key": token(EC_KEY, "rsa", "ES256"),
    "another audience": token(aud="other"),
    "no audience": token(aud=None),
    "another issuer": token(iss="https://other.test"),
    "no issuer": token(iss=None),
    "not valid yet": token(nbf=time.time() + 3600),
    "issued in the future": token(iat=time.time() + 3600),
    "expired": token(exp=time.time() - 2 * LEEWAY_S),
    "without end": token(exp=None),
    "an end beyond all times": token(exp=10**400),
    "unknown": token(sub=None),
    "a subject that is no text": token(sub=7),
    "an unknown kid": token(kid="new"),
    "no kid": token(kid=None),
    "a kid that is no text": f"{b64({'alg': 'RS256', 'kid': 7})}.{b64(claims())}.AAAA",
    "an unknown critical header": jwt.encode(claims(), RSA_KEY, "RS256", {"kid": "rsa", "crit": ["x"], "x": 1}),
    "a key inside the token": jwt.encode(claims(), EC_KEY, "ES256", {"kid": "mine", "jwk": public(EC_KEY, "mine")}),
    "a changed claim": with_claims(token(), sub="operator"),
    "cut": token()[:-4],
    "no base64": "!.!.!",
    "empty parts": "..",
    "too long": token(pad="x" * MAX_TOKEN_CHARS),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_token_is_refused(checked, how):
    with pytest.raises(Unauthenticated) as caught:
        checked.check(FORGED[how])
    assert FORGED[how] not in str(caught.value)


SECRET = {"kty": "oct", "k": "c2VjcmV0LXNlY3JldA", "kid": "s", "alg": "HS256"}
BAD_FILES = {
    "is not a JSON Web Key Set": "nonsense",
    "is not a JSON Web Key Set ": json.dumps({"keys": {}}),
    "is not a JSON Web Key Set  ": json.dumps({"keys": []}),
    "has no text `kid`": json.dumps(
        {"keys": [{key: value for key, value in public(EC_KEY, "x").items() if key != "kid"}]}
    ),
    "is an RSA key of 1024 bits": json.dumps({"keys": [public(WEAK_RSA_KEY, "x")]}),
    "is a symmetric or private key": json.dumps({"keys": [SECRET]}),
    "is a symmetric or private key ": json.dumps({"keys": [{**public(EC_KEY, "x"), "d": "AAAA"}]}),
    "is not a valid public key": json.dumps({"keys": [{"kty": "RSA", "kid": "x"}]}),
    "has the same `kid` as an earlier key": json.dumps({"keys": [public(EC_KEY, "x"), public(RSA_KEY, "x")]}),
    "is for the algorithm HS256": json.dumps({"keys": [public(RSA_KEY, "x", alg="HS256")]}),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_an_invalid_key_file_is_refused_by_name(tmp_path, what):
    path = tmp_path / "jwks"
    path.write_text(BAD_FILES[what])
    with pytest.raises(InvalidArgument, match=f"{what.strip()}|is not a valid public key") as caught:
        read_web_tokens(str(path), ISSUER, AUDIENCE)
    assert caught.value.field == "auth_jwks"


@pytest.fixture
def world(tmp_path, keys):
    owners = {"acme": {}, "team": {"subjects": ["jwt:user-7"]}}
    guard = Guard(tmp_path, owners)
    config = guard.config(auth_jwks=str(keys), auth_jwt_issuer=ISSUER, auth_jwt_audience=AUDIENCE, lease_ms=100)
    with running(config) as service:
        yield service


def test_a_subject_is_an_owner_by_its_name_or_by_the_file(world):
    Caller(world, token()).register("acme/r")
    Caller(world, token(sub="user-7")).register("team/r")
    Caller(world, "token-acme").describe("acme/r")
    with refusal(PermissionDenied):
        Caller(world, token(sub="team")).admin.Status(STATUS)
    with refusal(PermissionDenied):
        Caller(world, token(sub="unknown")).admin.Status(STATUS)


def test_a_session_ends_with_its_token(world):
    caller = Caller(world, token(exp=time.time() + 2 - LEEWAY_S))
    caller.register("acme/r")
    assert isinstance(caller.open("acme/r").end(), Unauthenticated)


def test_keys_are_changed_under_load(world, keys):
    """Old tokens until the old key goes, new ones from when theirs comes, and never an error else."""
    fresh = rsa.generate_private_key(65537, 2048)
    old, new = Caller(world, token()), Caller(world, token(fresh, "fresh"))
    stop, failures, calls = threading.Event(), [], []

    def load() -> None:
        while not stop.is_set():
            try:
                old.admin.Status(STATUS)
                calls.append(1)
            except Exception as error:
                failures.append(error)
                return

    with refusal(Unauthenticated):
        new.admin.Status(STATUS)
    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            replace(keys, json.dumps({"keys": [public(RSA_KEY, "rsa"), public(fresh, "fresh")]}))
            new.admin.Status(STATUS)
            replace(keys, json.dumps({"keys": [public(RSA_KEY, "rsa")]}))
            with refusal(Unauthenticated):
                new.admin.Status(STATUS)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert calls
    replace(keys, json.dumps({"keys": [public(fresh, "fresh")]}))
    new.admin.Status(STATUS)
    with refusal(Unauthenticated):
        old.admin.Status(STATUS)
