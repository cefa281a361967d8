"""The built-in workload of conversations about documents."""

from __future__ import annotations

from random import Random

from kvplane_tools.replay.workloads import DocumentShape, TraceRequest, document_workload

SHAPE = DocumentShape(num_documents=5, document_tokens=100, turns=3, round_s=2.0, question_tokens=7, answer_tokens=9)


def requests_of(seed: int) -> list[TraceRequest]:
    return list(document_workload(Random(seed), SHAPE))


def test_document_workload_is_determined_by_its_seed():
    assert requests_of(1) == requests_of(1)
    assert requests_of(1) != requests_of(2)


def test_rounds_have_a_question_of_each_conversation():
    requests = requests_of(3)
    assert len(requests) == 15
    assert len({one.name for one in requests}) == 15
    for turn in range(3):
        asked = requests[5 * turn : 5 * turn + 5]
        assert {one.arrival_s for one in asked} == {2.0 * turn}
        assert len({one.session for one in asked}) == 5


def test_a_prompt_begins_with_the_prompt_and_the_answer_before_it():
    requests = {one.name: one for one in requests_of(4)}
    for document in range(5):
        first, second, third = (requests[f"document-{document}/{turn}"] for turn in range(3))
        assert second.prompt.packed().startswith(first.prompt.packed() + first.output.packed())
        assert third.prompt.packed().startswith(second.prompt.packed() + second.output.packed())
        assert len(first.prompt) == 107
        assert len(third.prompt) + len(third.output) == SHAPE.max_model_len
    texts = [requests[f"document-{one}/0"].prompt.packed() for one in range(5)]
    assert len(set(texts)) == 5
    assert all(a[:8] != b[:8] for at, a in enumerate(texts) for b in texts[at + 1 :])
