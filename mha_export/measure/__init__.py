"""Measuring: parity against float64, where two models part, latency, and how far from the limit."""

from __future__ import annotations

from mha_export.measure.compare import Side, compare_models
from mha_export.measure.failures import keep_failures, replay_of
from mha_export.measure.latency import Contender, LatencySettings, Timing, measure_latency
from mha_export.measure.machine import machine_record
from mha_export.measure.model_inputs import (
    ModelCase,
    inputs_from_file,
    model_cases,
    ordinary_inputs,
)
from mha_export.measure.parity import (
    check_parity,
    reason_of,
    save_case,
    spec_parity,
    status_of,
)
from mha_export.measure.reference_run import Expected, ModelReference
from mha_export.measure.roofline import Ceilings, Rates, Work, ceilings_of, rates, work_of

__all__ = [
    "Ceilings",
    "Contender",
    "Expected",
    "LatencySettings",
    "ModelCase",
    "ModelReference",
    "Rates",
    "Side",
    "Timing",
    "Work",
    "ceilings_of",
    "check_parity",
    "compare_models",
    "inputs_from_file",
    "keep_failures",
    "machine_record",
    "measure_latency",
    "model_cases",
    "ordinary_inputs",
    "rates",
    "reason_of",
    "replay_of",
    "save_case",
    "spec_parity",
    "status_of",
    "work_of",
]
