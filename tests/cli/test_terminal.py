"""What a person sees while a job is under way."""

from __future__ import annotations

import pytest

from mha_export.cli._terminal import _PlainProgress

STEPS = [
    (0.0, "reading the model", "... reading the model\n"),
    (0.1, "reading the model", ""),
    (1.0, "parity on openvino: input 1 of 3", "... parity on openvino\n"),
    (8.0, "parity on openvino: input 2 of 3", ""),
    (11.0, "parity on openvino: input 3 of 3", "... parity on openvino: input 3 of 3\n"),
    (12.0, "parity on openvino:bf16: input 1 of 3", "... parity on openvino:bf16\n"),
    (20.0, "parity on openvino:bf16: input 2 of 3", ""),
]
"""Seconds, a step, and the line of it in a log."""


def test_a_log_gets_a_line_a_step_and_another_when_ten_seconds_have_gone_by(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seconds = iter([at for at, _, _ in STEPS])
    told = _PlainProgress(clock=lambda: next(seconds))
    for _, step, line in STEPS:
        told(step)
        assert capsys.readouterr().err == line
