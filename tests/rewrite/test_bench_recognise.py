"""What ``scripts/bench_recognise`` shows: the docs' page is its own, bounds are told as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def show() -> Any:
    import _recognise_show

    return _recognise_show


def test_the_page_of_the_docs_is_written_by_the_script(show: Any) -> None:
    found = json.loads((DOCS / "bench_recognise.json").read_text(encoding="utf-8"))
    chart = "assets/bench-recognise.svg"
    assert (DOCS / chart).exists()
    wanted = (DOCS / "bench_recognise.md").read_text(encoding="utf-8")
    assert show.page(found, chart=chart) == wanted


def _row(tool: str, layers: int, **figures: Any) -> dict[str, Any]:
    row = {"family": "llama", "exporter": "legacy", "layers": layers, "tool": tool, **figures}
    return {"peak_rss_mb": 100.0, "fused": layers, **row} if "cpu_seconds" in figures else row


def test_a_peer_that_was_ended_gives_a_bound(show: Any) -> None:
    document = {
        "rows": [
            _row("mha_export", 6, cpu_seconds=1.0),
            _row("onnxruntime", 6, cpu_seconds=5.0),
            _row("onnxscript", 6, over=60),
            _row("mha_export", 12, cpu_seconds=2.0),
            _row("onnxruntime", 12, over=60),
            _row("onnxscript", 12, over=60),
        ]
    }
    text = show.tables(document)
    assert "| onnxscript | > 60 s | > 60 s |" in text
    assert "| faster than the faster peer | 5.0x | > 30.0x |" in text
    assert "| growth of ours per doubling | - | 2.00x |" in text


def test_the_chart_is_the_same_each_time(show: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = json.loads((DOCS / "bench_recognise.json").read_text(encoding="utf-8"))
    for name in ("one.svg", "two.svg"):
        show.write_chart(found, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
