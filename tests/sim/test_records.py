"""The table of campaigns is complete: every campaign is counted once, every failure has a cause."""

from __future__ import annotations

from tests.sim import records
from tests.sim.campaign import Totals


def test_campaign_rows_have_seeds_and_failures_have_causes():
    for row in records.rows():
        first, last = map(int, row[2].split(".."))
        assert int(row[3]) == last - first + 1, row
        failed = row[8] != "0"
        assert failed == (row[9] != records.NONE), row
        assert row[9] != records.UNKNOWN, f"find the cause: {row}"


def test_campaign_row_is_appended(tmp_path, monkeypatch):
    table = tmp_path / "CAMPAIGNS.md"
    table.write_text(records.TABLE.read_text())
    before = records.total_seeds()
    monkeypatch.setattr(records, "TABLE", table)
    monkeypatch.setattr(records, "_git", lambda *_: "abc")
    records.append(range(5, 8), Totals(seeds=3, steps=900))
    assert records.total_seeds() == before + 3
    assert records.rows()[-1][2:5] == ["5..7", "3", "900"]
