"""Every format renders the sample, the same every time, and says what must be said."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from mha_export.errors import InputError
from mha_export.report import (
    Report,
    format_for,
    merge,
    open_report,
    verdict_of,
    write_report,
)
from mha_export.report.formats import Format, all_formats
from mha_export.report.records import (
    Loaded,
    MachineRecord,
    ResultRecord,
    ResultsRecord,
    validate,
)

SUFFIXES = (".html", ".md", ".json", ".xml")
HOSTILE = "<script>alert(1)</script> | `x` \x07"


def _hostile() -> Report:
    machine = MachineRecord(id="m", os=HOSTILE, cpu=HOSTILE, memory_gb=1.0)
    result = ResultRecord(
        model=HOSTILE,
        model_sha256="0",
        target="cpu",
        status="error",
        reason=HOSTILE,
        replay=HOSTILE,
    )
    run = ResultsRecord(machine=machine, results=(result,))
    return merge(Loaded(results=((Path("r.json"), run),)))


def test_every_suffix_has_a_format() -> None:
    assert {suffix for f in all_formats() for suffix in f.suffixes} >= set(SUFFIXES)


@pytest.mark.parametrize("format_", all_formats(), ids=lambda f: f.name)
def test_the_same_report_gives_the_same_bytes(format_: Format, changed: Report) -> None:
    text = format_.render(changed)
    assert text == format_.render(changed)
    assert text.endswith("\n")


@pytest.mark.slow
def test_html_bytes_do_not_depend_on_the_process() -> None:
    sample_file = str(Path(__file__).with_name("conftest.py"))
    program = (
        "import importlib.util as u, sys, hashlib\n"
        f"s = u.spec_from_file_location('sample', {sample_file!r})\n"
        "m = u.module_from_spec(s); s.loader.exec_module(m)\n"
        "from mha_export.report import merge, format_for\n"
        "text = format_for('r.html').render(merge(m.sample_loaded()))\n"
        "print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("format_", all_formats(), ids=lambda f: f.name)
def test_every_problem_is_named_in_every_format(format_: Format, changed: Report) -> None:
    text = format_.render(changed)
    for words in ("webgpu", "openvino", "SIGSEGV", "layer.2.self", "old.json", "61"):
        assert words in text, words


@pytest.mark.parametrize("format_", all_formats(), ids=lambda f: f.name)
def test_hostile_text_stays_text(format_: Format) -> None:
    text = format_.render(_hostile())
    if format_.name == "json":
        assert json.loads(text)["runs"][0]["results"][0]["reason"] == HOSTILE
    elif format_.name == "markdown":
        prose = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
        assert "<script>alert" not in prose
    else:
        assert "<script>alert" not in text
    if format_.name == "junit":
        ET.fromstring(text)


def test_nothing_at_all_still_renders() -> None:
    machine = MachineRecord(id="m", os="o", cpu="c", memory_gb=1.0)
    empty = merge(Loaded(results=((Path("r.json"), ResultsRecord(machine=machine)),)))
    for format_ in all_formats():
        assert format_.render(empty)
    assert verdict_of(empty).exit_code == 0


class _Page(HTMLParser):
    """Collects what the checks below need; complains about tags that do not close."""

    VOID = frozenset(("meta", "link", "br", "path", "use"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.urls: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag not in self.VOID:
            self.open.append(tag)
        if values.get("id"):
            self.ids.append(values["id"] or "")
        for name in ("src", "href", "xlink:href"):
            target = values.get(name)
            if target and target.startswith("#"):
                self.links.append(target[1:])
            elif target:
                self.urls.append(target)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(changed: Report) -> str:
    return format_for("report.html").render(changed)


@pytest.fixture(scope="module")
def parsed(page: str) -> _Page:
    return _Page(page)


def test_html_is_well_formed(parsed: _Page) -> None:
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids)), "ids are unique, across charts as well"
    assert set(parsed.links) <= set(parsed.ids), "every link within the page has a target"


def test_html_needs_no_network(parsed: _Page, page: str) -> None:
    assert all(url.startswith("data:") for url in parsed.urls)
    assert not re.search(r"@import|url\((?!#)", page)
    assert "fetch(" not in page


def test_html_can_be_read_without_seeing_it(parsed: _Page) -> None:
    tables = [tag for tag, _ in parsed.tags if tag == "table"]
    captions = [tag for tag, _ in parsed.tags if tag == "caption"]
    assert len(tables) == len(captions) > 3
    assert all(v.get("scope") for tag, v in parsed.tags if tag == "th")
    charts = [values for tag, values in parsed.tags if tag == "svg"]
    assert charts
    assert all(v.get("role") == "img" and v.get("aria-label") for v in charts)
    assert ("html", {"lang": "en"}) in parsed.tags
    assert any(tag == "main" for tag, _ in parsed.tags)


def test_charts_take_the_colours_of_the_page(page: str) -> None:
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    colours = {c for chart in charts for c in re.findall(r"(?:fill|stroke): *([^;\"]+)", chart)}
    assert {c for c in colours if c.startswith("#")} <= {"#ffffff"}
    assert any(c.startswith("var(--accent)") for c in colours)
    assert "<metadata" not in page
    assert "DejaVu" not in "".join(charts)


def test_sites_alike_are_put_together(page: str) -> None:
    assert "layer.0.self … layer.5.self" in page
    assert page.count("/encoder/layer.3/attention/self/Softmax") == 2, "each model opens to nodes"


def test_html_without_its_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, sample: Report
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InputError, match="Jinja2") as caught:
        format_for("r.html").render(sample)
    assert "mha-export[report]" in str(caught.value)


def test_the_json_report_reads_back_to_itself(changed: Report, tmp_path: Path) -> None:
    path = write_report(changed, tmp_path / "report.json")
    data = json.loads(path.read_text())
    validate("report", data)
    assert data["verdict"] == verdict_of(changed).line
    again = open_report([path])
    assert again.runs == changed.runs
    assert [e.number for e in again.entries] == [e.number for e in changed.entries]


def test_junit_counts_what_failed(changed: Report) -> None:
    root = ET.fromstring(format_for("r.xml").render(changed))
    bad = [e for e in changed.entries if e.result.status in ("fail", "fallback")]
    regressions = [c for c in changed.changes or () if c.severity == "regression"]
    assert int(root.get("failures", "0")) == len(bad) + len(regressions)
    assert int(root.get("errors", "0")) == 1
    assert int(root.get("tests", "0")) == sum(len(suite) for suite in root)


def test_markdown_tables_have_equal_rows(changed: Report) -> None:
    text = format_for("r.md").render(changed)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = {len(re.split(r"(?<!\\)\|", row)) for row in rows}
    assert len(rows) == len(changed.entries) + 2
    assert len(cells) == 1


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.html.gz"])
def test_an_unknown_suffix_is_refused(name: str, sample: Report) -> None:
    with pytest.raises(InputError, match="no report format"):
        write_report(sample, name)
