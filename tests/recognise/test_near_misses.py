"""Nothing that differs by one edit from an attention is taken for it.

Whatever site is returned must be confirmed by the oracle on random inputs; where an edit must show
in the spec, or must be refused, the table says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from near_misses import EDITS, Edit, near_misses
from spellings import Choices, attention

from mha_export.recognise import recognise

CASES = list(near_misses())
_QUICK_PER_EDIT = 3


def _parameters() -> list[object]:
    seen: Counter[str] = Counter()
    found = []
    for name, positive, edit, choices in CASES:
        seen[name] += 1
        marks = [pytest.mark.slow] if seen[name] > _QUICK_PER_EDIT else []
        found.append(pytest.param(edit, choices, id=f"{name}/{positive}", marks=marks))
    return found


@pytest.mark.parametrize(("edit", "choices"), _parameters())
def test_near_miss(
    edit: Edit,
    choices: Choices,
    random_feeds: Callable[..., dict[str, np.ndarray]],
    assert_sound: Callable[..., None],
) -> None:
    model = attention(choices)
    recognition = recognise(model)
    assert len(recognition.verdicts) == 1
    sites = recognition.sites
    if edit.outcome == "refused":
        assert not sites
        assert recognition.rejections[0].reason.message
        return
    for site in sites:
        stated = site.spec.to_json()
        for field, value in (edit.told_by or {}).items():
            assert stated[field] == (pytest.approx(value) if isinstance(value, float) else value)
    assert_sound(recognition, random_feeds(model))
    assert_sound(recognition, random_feeds(model, seed=1, batch=3, seq=6, keys=4, past=2))


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 60
    assert {name for name, *_ in CASES} == set(EDITS)


def test_the_table_of_the_docs_is_this_one() -> None:
    """Every edit with its outcome and the number of positives it was applied to."""
    text = (Path(__file__).parents[2] / "docs/recognition.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if re.fullmatch(r"\| [a-z].*\| \d+ \|", line)]
    rows = [line.split("|") for line in lines]
    stated = {row[1].strip(): (row[2].strip(), int(row[4])) for row in rows}
    counted = Counter(name for name, *_ in CASES)
    assert stated == {
        name.replace("-", " "): (edit.outcome, counted[name]) for name, edit in EDITS.items()
    }
    assert f"| **{len(EDITS)} edits** | | | **{len(CASES)}** |" in text
