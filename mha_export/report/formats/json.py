"""The merged report as JSON: itself a file that ``report`` reads."""

from __future__ import annotations

from typing import Any

from mha_export.report._merge import Report
from mha_export.report._verdict import verdict_of
from mha_export.report.records import SCHEMA_VERSION, to_plain, validate
from mha_export.report.records._files import dumps


def document(report: Report) -> dict[str, Any]:
    """The report as JSON data, valid under ``report.schema.json``."""
    verdict = verdict_of(report)
    data: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict.line,
        "exit_code": verdict.exit_code,
        "counts": to_plain(verdict.counts),
        "runs": to_plain(report.runs),
        "damaged": [{"path": str(d.path), "reason": d.reason} for d in report.damaged],
        "changes": None if report.changes is None else to_plain(report.changes),
    }
    validate("report", data, where="report")
    return data


class JsonFormat:
    """``report.schema.json``."""

    name = "json"
    suffixes = (".json",)

    def render(self, report: Report) -> str:
        return dumps(document(report))


FORMAT = JsonFormat()
