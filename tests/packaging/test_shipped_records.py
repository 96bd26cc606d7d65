"""Results measured where most have no such device: whole, and with no path of a machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mha_export.report.records import ResultsRecord, read_record

RECORDS = sorted((Path(__file__).parents[2] / "docs" / "records").glob("*.json"))


def test_there_are_some() -> None:
    assert RECORDS


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_whole_and_says_with_what_it_was_measured(path: Path) -> None:
    record = read_record(path, ResultsRecord)
    assert re.search(r"-\d{4}-\d\d-\d\d$", path.stem), "the name ends with the date"
    assert {result.model for result in record.results} == {"all-MiniLM-L6-v2", "tiny-llama-gqa"}
    assert record.unfinished is None
    for result in record.results:
        assert path.stem.startswith(result.target)
        assert result.status in ("pass", "built")
        assert result.runtime_version
        assert result.placement is not None
        assert result.placement.on_target == result.placement.float_compute_nodes > 0
    assert not re.search(r"[\"' ](/|[A-Z]:\\\\)\w", path.read_text()), "a path of a machine"
