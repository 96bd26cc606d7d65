"""Optional targets may be absent, unless ``MHA_EXPORT_REQUIRED_TARGETS`` names them."""

from __future__ import annotations

import os

import pytest

from mha_export.targets import Available, Unavailable, target_named


@pytest.fixture
def needs_target():
    """``needs_target(name)``: skip the test where an optional target is absent, fail where it is
    required."""

    def check(name: str, *, to_run: bool = True) -> None:
        availability = target_named(name).availability()
        state = availability.run if to_run else availability.build
        if isinstance(state, Available):
            return
        assert isinstance(state, Unavailable)
        required = os.environ.get("MHA_EXPORT_REQUIRED_TARGETS", "cpu,reference,openvino")
        if {name, f"{name}:build"} & set(required.split(",")):
            pytest.fail(f"target {name} is required: {state.reason}; {state.fix}")
        pytest.skip(f"target {name} is not here: {state.reason}")

    return check
