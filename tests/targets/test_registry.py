"""Which targets there are, and what ``-t`` may name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mha_export.errors import InputError
from mha_export.forms import FormParams, form_named
from mha_export.spec import DType
from mha_export.targets import (
    FEATURES,
    Availability,
    Available,
    Target,
    Unavailable,
    all_targets,
    parse_target,
    parse_targets,
    target_named,
)
from mha_export.targets._probe_cases import form_probes

TARGETS = list(all_targets().values())


def test_the_registry_begins_with_the_dependable_ones_and_has_no_duplicates() -> None:
    names = [target.name for target in TARGETS]
    assert names[:3] == ["cpu", "reference", "openvino"]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_target_keeps_the_protocol(target) -> None:
    assert isinstance(target, Target)
    assert target_named(target.name) is target
    assert target.default_forms[-1] == "primitive"
    assert target.summary
    assert target.max_opset >= 13
    availability = target.availability()
    assert isinstance(availability, Availability)
    for state in (availability.build, availability.run):
        assert isinstance(state, (Available, Unavailable))
        if isinstance(state, Unavailable):
            assert state.reason
            assert state.fix, "an absent target says what would make it work"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_forms_understand_what_a_target_tells_them(target) -> None:
    for name, options in target.form_options.items():
        assert name in target.default_forms
        told = FormParams(opset=target.max_opset, options=options)
        assert form_named(name).supports(FEATURES["plain"], told)
        assert [one.feature for one in form_probes(DType.FP32, max_opset=22, forms=[name])] == [
            one.feature
            for one in form_probes(DType.FP32, max_opset=22, forms=[name], told=target.form_options)
        ]


def test_an_unknown_target_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="unknown target 'cpuu'") as caught:
        target_named("cpuu")
    assert caught.value.fix is not None
    assert "openvino" in caught.value.fix


def test_a_precision_is_parsed_and_checked() -> None:
    request = parse_target("openvino:bf16")
    assert (request.target.name, request.precision, request.name) == (
        "openvino",
        "bf16",
        "openvino:bf16",
    )
    assert parse_target("cpu").precision is None
    with pytest.raises(InputError, match="no precision 'int3'") as caught:
        parse_target("openvino:int3")
    assert "openvino:f16" in str(caught.value.fix)
    with pytest.raises(InputError) as caught:
        parse_target("cpu:bf16")
    assert "--dtype" in str(caught.value.fix)


def test_all_means_what_builds_here_and_duplicates_are_dropped() -> None:
    requests = parse_targets(["cpu", "all", "openvino:bf16", "openvino:bf16"])
    names = [request.name for request in requests]
    assert names[0] == "cpu"
    assert len(set(names)) == len(names)
    assert "openvino:bf16" in names
    assert "reference" in names
    for request in requests:
        assert isinstance(request.target.availability().build, Available)


def test_listing_targets_imports_no_runtime() -> None:
    code = (
        "import sys, mha_export.targets as t; t.all_targets()\n"
        "runtimes = {'onnxruntime', 'openvino', 'tensorrt', 'tensorrt_rtx', 'torch'}\n"
        "bad = runtimes & set(sys.modules)\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
