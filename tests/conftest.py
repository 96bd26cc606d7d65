"""What holds for every test: no network, and the targets that must be here are here."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

REQUIRED = "MHA_EXPORT_REQUIRED_TARGETS"


def pytest_sessionstart(session: pytest.Session) -> None:
    """End the run where a required target cannot run here: its tests would be skipped."""
    if hasattr(session.config, "workerinput"):  # a process of pytest-xdist: already checked
        return
    wanted = [name.strip() for name in os.environ.get(REQUIRED, "").split(",") if name.strip()]
    if not wanted:
        return
    from mha_export.targets import Unavailable, target_named

    for name in wanted:
        state = target_named(name).availability().run
        if isinstance(state, Unavailable):
            pytest.exit(
                f"{REQUIRED} names {name}, which cannot run here: {state.reason}\n"
                f"  fix: {state.fix}",
                returncode=1,
            )
