"""The engine that proofs in these tests run on."""

from __future__ import annotations

import pytest

from mha_export.evaluator import Evaluator
from mha_export.targets import evaluator_of


@pytest.fixture(scope="session")
def evaluator() -> Evaluator:
    return evaluator_of("cpu")
