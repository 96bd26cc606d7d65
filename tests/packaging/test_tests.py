"""The suite itself: what pytest would trip over only in a full run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_files_of_tests_share_a_name() -> None:
    """Without packages pytest imports each by its bare name."""
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, times in names.items() if times > 1] == []
