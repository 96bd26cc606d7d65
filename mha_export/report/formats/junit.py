"""JUnit XML for continuous integration: one suite a machine, one test case a result.

``imprecise`` passes with a line of output; ``unsupported`` and ``unavailable`` are skipped;
``fail`` and ``fallback`` are failures; ``error`` is an error.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from mha_export.report._figures import figure, workload
from mha_export.report._merge import Entry, Report

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_OUTCOME = {
    "fail": "failure",
    "fallback": "failure",
    "error": "error",
    "unsupported": "skipped",
    "unavailable": "skipped",
}


class JunitFormat:
    """The dialect that Jenkins, GitLab and GitHub's reporters read."""

    name = "junit"
    suffixes = (".xml",)

    def render(self, report: Report) -> str:
        root = ET.Element("testsuites", name="mha-export")
        for machine in report.machines:
            entries = [entry for entry in report.entries if entry.machine.id == machine.id]
            _suite(root, machine.id, [_test(entry) for entry in entries])
        if report.changes is not None:
            cases = []
            for change in report.changes:
                case = ET.Element(
                    "testcase", classname=f"against.{change.kind}", name=change.subject
                )
                if change.severity == "regression":
                    ET.SubElement(case, "failure", message=_clean(change.message), type=change.kind)
                cases.append(case)
            _suite(root, "against", cases)
        if report.damaged:
            cases = []
            for damaged in report.damaged:
                case = ET.Element("testcase", classname="input", name=_clean(str(damaged.path)))
                ET.SubElement(case, "skipped", message=_clean(damaged.reason))
                cases.append(case)
            _suite(root, "damaged files", cases)
        for name in ("tests", "failures", "errors", "skipped"):
            root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
        ET.indent(root)
        return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, "unicode") + "\n"


def _suite(root: ET.Element, name: str, cases: list[ET.Element]) -> None:
    counts = {
        "tests": len(cases),
        "failures": sum(case.find("failure") is not None for case in cases),
        "errors": sum(case.find("error") is not None for case in cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
    }
    suite = ET.SubElement(
        root, "testsuite", {"name": _clean(name), **{k: str(v) for k, v in counts.items()}}
    )
    suite.extend(cases)


def _test(entry: Entry) -> ET.Element:
    result = entry.result
    parts = [entry.target, result.graph, workload(result.workload)]
    case = ET.Element(
        "testcase",
        classname=_clean(result.model),
        name=_clean(" / ".join(part for part in parts if part)),
    )
    if result.latency_ms is not None:
        case.set("time", f"{result.latency_ms.p50 / 1000:.6f}")
    outcome = _OUTCOME.get(result.status)
    message = _clean(result.reason or result.status)
    if outcome is not None:
        element = ET.SubElement(case, outcome, message=message)
        if outcome != "skipped":
            element.set("type", result.status)
            element.text = _clean(_detail(entry))
    elif result.status == "imprecise":
        ET.SubElement(case, "system-out").text = f"imprecise: {message}"
    return case


def _detail(entry: Entry) -> str:
    result, lines = entry.result, []
    parity = result.parity
    if parity is not None:
        first = parity.first_difference
        if first is not None:
            lines.append(f"first difference: {first.site}, {first.stage}: {first.message}")
        lines += [
            f"{case.name}: {case.status}, error {figure(case.max_abs)}, bound {figure(case.bound)}"
            for case in parity.by_case
            if case.status != "pass"
        ]
    if result.placement is not None:
        lines += result.placement.elsewhere
    if result.replay:
        lines.append(f"replay: {result.replay}")
    return "\n".join(lines)


def _clean(text: str) -> str:
    """Text without the characters XML cannot hold: a crashed runtime may print anything."""
    return _NOT_XML.sub("\ufffd", text)


FORMAT = JunitFormat()
