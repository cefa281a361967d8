"""Names that clients choose reach a terminal escaped, in every form of an answer."""

from __future__ import annotations

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.v1.admin_pb2 import ExplainResponse, ListRequestsResponse, RequestState
from kvplane_tools.cli.options import Format, Shape
from kvplane_tools.cli.output import columns, escaped, show
from kvplane_tools.cli.query.explain import _lines

HOSTILE = "a\x1b]0;title\x07\x1b[31m\r\x9b\u202e\nFAKE\x00"
ANSWER = ListRequestsResponse(requests=[RequestState(request_id=HOSTILE)])


@pytest.mark.parametrize(
    "output",
    [Shape(one) for one in Format if one is not Format.JSONPATH]
    + [Shape(Format.JSONPATH, "{.requests[*].request_id}")],
    ids=lambda one: one.format.name,
)
def test_a_hostile_name_is_escaped_in_every_format(output, capsys):
    table = lambda: columns([("REQUEST",), (HOSTILE,)])  # noqa: E731
    show(ANSWER, output, table=table, name=lambda: escaped(HOSTILE))
    shown = capsys.readouterr().out
    assert all(one.isprintable() or one == "\n" for one in shown), ascii(shown)
    assert "\nFAKE" not in shown
    assert "FAKE" in shown


def test_an_explanation_names_a_hostile_request_escaped(capsys):
    answer = ExplainResponse(cause="MISS_CAUSE_EVICTED", by=HOSTILE, epoch=1, seq=1)
    show(answer, Shape(Format.TABLE), table=lambda: "\n".join(_lines(answer)))
    shown = capsys.readouterr().out
    assert all(one.isprintable() or one == "\n" for one in shown), ascii(shown)
    assert "\nFAKE" not in shown


def test_what_is_printable_stays_as_it_is():
    assert escaped("Grüße, 東京 🚀") == "Grüße, 東京 🚀"
    assert escaped("a\nb", "\n") == "a\nb"
    with pytest.raises(InvalidArgument):
        show(ANSWER, Shape(Format.NAME))
