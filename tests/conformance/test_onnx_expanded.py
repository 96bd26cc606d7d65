"""ONNX's attention bodies: each is found, stated as its op form states it, and rewritten."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from onnx_expanded import FORMS, Found, differences, expanded_outcome, found_cases, said_otherwise
from onnx_forms import KNOWN

from mha_export.spec import CausalAlignment

CASES = found_cases()
PAGE = Path(__file__).parents[2] / "docs" / "onnx-node-tests.md"


@pytest.mark.parametrize("found", CASES, ids=lambda found: found.case.name)
def test_the_attention_in_a_body_is_that_of_its_op(found: Found) -> None:
    unexplained = [name for name, reason in said_otherwise(found).items() if reason is None]
    assert unexplained == [], differences(found.site.spec, found.twin.spec)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("found", CASES, ids=lambda found: found.case.name)
def test_a_rewritten_body_gives_the_stored_outputs(found: Found, form: str) -> None:
    outcome = expanded_outcome(found, form)
    if (form, found.twin.case.name) in KNOWN:
        assert outcome.status == "fail", "mended, so remove it from the list"
    else:
        allowed = ("pass",) if form == "primitive" else ("pass", "unsupported")
        assert outcome.status in allowed, outcome.reason


def test_there_is_a_body_for_every_case_in_op_form() -> None:
    assert len(CASES) == len({found.twin.case.name for found in CASES}) > 90


def test_a_difference_that_nobody_explains_is_one() -> None:
    plain = next(found for found in CASES if found.case.name == "test_attention_4d_causal_expanded")
    other = next(found for found in CASES if found.case.name == "test_attention_4d_expanded")
    wrong = Found(case=plain.case, twin=other.twin, recognition=plain.recognition)
    assert said_otherwise(wrong)["mask.causal"] is None
    assert differences(plain.site.spec, other.twin.spec)["mask.causal"] == (
        CausalAlignment.TOP_LEFT,
        None,
    )


def test_the_page_has_a_row_for_every_case_and_every_known_failure() -> None:
    """It is what scripts/onnx_node_tests prints; the marks are the tests' affair."""
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+)(?: \(reference\))? \|", page, flags=re.MULTILINE)
    names = [found.twin.case.name.removeprefix("test_attention_") for found in CASES]
    assert sorted(name for name in rows if name != "case") == sorted(names * 2)
    for form, case in KNOWN:
        assert f"* {case}, {form}: " in page
    assert "NOT KNOWN" not in page
    assert "unexplained" not in page
