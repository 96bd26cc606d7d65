"""What holds for every test: no network, and the targets that must be here are here."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

REQUIRED = "MHA_EXPORT_REQUIRED_TARGETS"
if "directml" not in os.environ.get(REQUIRED, ""):
    # Minutes in the lab, and only some machines have one: where it is asked for.
    os.environ["MHA_EXPORT_DIRECTML_LAB"] = os.devnull


@pytest.fixture(scope="session")
def absent_target() -> str:
    """A target that cannot run on this machine: no machine has them all."""
    from mha_export.targets import Unavailable, all_targets

    return next(
        name
        for name, target in all_targets().items()
        if isinstance(target.availability().run, Unavailable)
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """End the run where a required target cannot run (``NAME:build``: cannot build) here.

    Its tests would be skipped.
    """
    if hasattr(session.config, "workerinput"):  # a process of pytest-xdist: already checked
        return
    wanted = [name.strip() for name in os.environ.get(REQUIRED, "").split(",") if name.strip()]
    if not wanted:
        return
    from mha_export.targets import Unavailable, target_named

    missing = []
    for name in wanted:
        target, _, build = name.partition(":")
        availability = target_named(target).availability()
        state = availability.build if build else availability.run
        if isinstance(state, Unavailable):
            missing.append(f"  {name}: {state.reason}\n    fix: {state.fix}")
    if missing:
        listed = "\n".join(missing)
        pytest.exit(f"{REQUIRED} names targets that are not here:\n{listed}", returncode=1)
