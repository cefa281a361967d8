"""The service indexer.v1.IndexerService of llm-d, for schedulers that ask how many blocks of a prompt each pod has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvplane.base.errors import FailedPrecondition, NotFound
from kvplane.v1 import front_ends_pb2 as pb
from kvplane_fleet.decisions import Ask, Decision
from kvplane_fleet.fleet import Fleet, Prompt
from kvplane_fleet.router.endpoints import Endpoints
from kvplane_fleet.router.prompts import Prompts, text_body
from kvplane_fleet.router.servicer import is_visible

NAME = "indexer.v1.IndexerService"


class PodScores:
    """Answers GetPodScores."""

    def __init__(self, fleet: Fleet, decide: Callable[[Ask], Awaitable[Decision]]) -> None:
        """`decide` scores for the caller's owner."""
        self._fleet, self._decide = fleet, decide
        self._prompts, self._endpoints = Prompts(fleet), Endpoints(fleet)

    async def GetPodScores(self, request: pb.GetPodScoresRequest, _: bytes) -> pb.GetPodScoresResponse:  # noqa: N802
        """See front_ends.proto."""
        model = request.model_name
        places = list(filter(is_visible, self._fleet.of_model(model)))
        if not places:
            raise NotFound(f"no place has the model {model[:140]!r}", field="model_name")
        tokens = await self._prompts.tokenized(model, text_body(request.prompt), places)
        if not tokens:
            raise FailedPrecondition(
                "no engine of the model tokenizes the prompt",
                field="prompt",
                remedy="give the places an `endpoint` that serves /tokenize, or call kvplane.v1.Routing/Score",
            )
        decision = await self._decide(Ask(model, Prompt(tokens)))
        addresses = await self._endpoints.of(places)
        asked = {one: one for one in request.pod_identifiers}
        scores = []
        for one in decision.places:
            name = one.claim.place
            address = addresses.get(name, "")
            pods = [asked[each] for each in (name, address, address.rpartition(":")[0]) if each in asked]
            domain = self._fleet.followed[name].place.domain
            if domain is not None and one.claim.tokens and (pods or not asked):
                scores.append(pb.PodScore(pod=(pods or [name])[0], score=one.claim.tokens // domain.block_size))
        return pb.GetPodScoresResponse(scores=scores)
