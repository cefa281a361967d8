"""The load of a soak test: every kind of client, in a loop, each on its own thread and channel."""

from __future__ import annotations

import random
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable

import kvplane
from kvplane import Allocate, Client, Content, End, FactRow, KvplaneError, ModelSource
from kvplane.base.requests import At
from kvplane.session.rows import part_of
from tests.client.mini_engine import MiniEngine

SMALL = ModelSource(model="llama-3.1-8b", num_blocks=120, max_model_len=1024, max_batched_tokens=256)
HYBRID = ModelSource(model="gemma-3-27b", num_blocks=900, max_model_len=1024, max_batched_tokens=256)


class Load:
    """Threads that call a service until `end`; `done` counts calls, `errors` counts refusals."""

    def __init__(self, address: str, metrics: str, seed: int = 1) -> None:
        self.done: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._address, self._metrics = address, metrics
        self._seed = seed
        self._stop_reading, self._stop = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []  # wait for events, which the other threads cause
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Register the replicas, and start the threads."""
        with kvplane.connect(self._address) as client:
            for name, source in (("small", SMALL), ("hybrid", HYBRID), ("unary", SMALL), ("short", SMALL)):
                client.register_replica(name, source)
        acts: dict[str, Callable[[Client, random.Random], None]] = {
            "engine small": lambda client, rng: self._engine(client, rng, "small"),
            "engine hybrid": lambda client, rng: self._engine(client, rng, "hybrid"),
            "session": self._session,
            "replica": self._replica,
            "unary": self._unary,
            "explain": self._explain,
            "subscriber": self._subscriber,
            "follower": self._follower,
            "scrape": self._scrape,
        }
        for number, (name, act) in enumerate(acts.items()):
            rng = random.Random(self._seed * 1000 + number)
            threads, stop = (
                (self._readers, self._stop_reading)
                if name in ("subscriber", "follower")
                else (self._threads, self._stop)
            )
            threads.append(threading.Thread(target=self._repeat, args=(name, act, rng, stop), daemon=True))
        for thread in (*self._readers, *self._threads):
            thread.start()

    def end(self) -> None:
        """Let every thread finish its call; readers first, while there are still events to read."""
        for stop, threads in ((self._stop_reading, self._readers), (self._stop, self._threads)):
            stop.set()
            for thread in threads:
                thread.join(30)
            assert not any(thread.is_alive() for thread in threads), "a caller hangs"

    def _repeat(
        self, name: str, act: Callable[[Client, random.Random], None], rng: random.Random, stop: threading.Event
    ) -> None:
        with kvplane.connect(self._address) as client:
            while not stop.is_set():
                try:
                    act(client, rng)
                except KvplaneError as error:
                    with self._lock:
                        self.errors[f"{name}: {type(error).__name__}: {error}"[:200]] += 1
                    stop.wait(0.1)
                with self._lock:
                    self.done[name] += 1

    # -- kinds of clients --------------------------------------------------------------------------------------------

    def _engine(self, client: Client, rng: random.Random, name: str) -> None:
        """Engine lives, one after another: each is a session with 24 requests in a full pool, some preempted."""
        with client.session(name) as session:
            MiniEngine(lambda part: session.apply(part).parts[0], seed=rng.getrandbits(30)).run()

    def _session(self, client: Client, rng: random.Random) -> None:
        with client.session("short") as session:
            tokens = [rng.randrange(9999) for _ in range(200)]
            session.apply(part_of(kvplane.NewsRow(0, tokens=tokens), kvplane.AdmitRow(0)))
            if rng.random() < 0.5:  # otherwise the session ends with its request
                session.apply(part_of(FactRow(0, end=End.FREE)))
        self._stop.wait(0.05)

    def _replica(self, client: Client, rng: random.Random) -> None:
        name = f"passing-{rng.getrandbits(40):x}"
        client.register_replica(name, rng.choice((SMALL, HYBRID)))
        if rng.random() < 0.3:
            with client.session(name) as session:
                session.apply(part_of(kvplane.NewsRow(0, tokens=list(range(300))), kvplane.AdmitRow(0)))
        client.deregister_replica(name)
        self._stop.wait(0.1)

    def _unary(self, client: Client, rng: random.Random) -> None:
        """Allocate and free, with each call sent twice."""
        request = f"request-{rng.getrandbits(40):x}"
        wish, at = Allocate(request, Content([rng.randrange(9999) for _ in range(300)])), At(op_id=request)
        first, again = (client.allocate_slots("unary", wish, at) for _ in range(2))
        assert first == again, "a repeated call got a different response"
        client.free("unary", request)

    def _explain(self, client: Client, rng: random.Random) -> None:
        client.explain("hybrid", Content([rng.randrange(9999) for _ in range(300)]))
        self._stop.wait(0.2)

    def _subscriber(self, client: Client, rng: random.Random) -> None:
        """Short subscriptions: subscribe, read some events, leave."""
        batches = client.subscribe(rng.choice(("small", "hybrid")), after_seq=rng.choice((None, 0)))
        for _ in range(rng.randrange(1, 40)):
            next(batches)
        batches.close()  # type: ignore[attr-defined]

    def _follower(self, client: Client, rng: random.Random) -> None:
        """Long subscriptions: read every batch for some seconds."""
        until_s = time.monotonic() + rng.uniform(1, 5)
        batches = client.subscribe("small", after_seq=None)
        for _ in batches:
            if time.monotonic() > until_s or self._stop_reading.is_set():
                break
        batches.close()  # type: ignore[attr-defined]

    def _scrape(self, client: Client, rng: random.Random) -> None:
        del client, rng
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=30) as answer:
            assert answer.read().endswith(b"# EOF\n") or answer.status == 200
        self._stop.wait(1)
