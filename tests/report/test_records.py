"""Records and schemas: round trips, drift, upgrades, damaged files, atomic writes."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_export.errors import InputError
from mha_export.report.records import (
    CapabilityRecord,
    CaseRecord,
    ComparisonRecord,
    DifferenceRecord,
    DoctorRecord,
    ExportRecord,
    LatencyRecord,
    MachineRecord,
    ModelRecord,
    ParityRecord,
    PlacementRecord,
    ProofCaseRecord,
    ProofRecord,
    RatioRecord,
    ReasonRecord,
    Record,
    ResultRecord,
    ResultsRecord,
    SideRecord,
    SiteOutcomeRecord,
    SitePairRecord,
    SiteRecord,
    StateRecord,
    TargetRecord,
    UnfinishedRecord,
    VariantRecord,
    read_export,
    read_record,
    read_results,
    validate,
    write_json,
)
from mha_export.report.records._files import SCHEMA_OF, schema
from mha_export.spec import AttentionSpec, CausalAlignment, MaskSpec, RotarySpec

MACHINE = MachineRecord(id="m1", os="Linux", cpu="a cpu", memory_gb=8.0, load=0.5)
PASS = ResultRecord(model="m", model_sha256="0" * 64, target="cpu", status="pass")
SPEC = AttentionSpec(
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    mask=MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT, left_window=3),
    rotary=RotarySpec(dim=8),
)

DEFS = {
    "machine": MachineRecord,
    "model": ModelRecord,
    "reason": ReasonRecord,
    "site": SiteRecord,
    "proof": ProofRecord,
    "outcome": SiteOutcomeRecord,
    "variant": VariantRecord,
    "placement": PlacementRecord,
    "case": CaseRecord,
    "difference": DifferenceRecord,
    "parity": ParityRecord,
    "latency": LatencyRecord,
    "ratio": RatioRecord,
    "result": ResultRecord,
    "state": StateRecord,
    "capability": CapabilityRecord,
    "target": TargetRecord,
    "unfinished": UnfinishedRecord,
    "side": SideRecord,
    "pair": SitePairRecord,
}
SCHEMAS = ("inspect", "export", "results", "doctor", "compare", "report")


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_is_a_valid_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(name))


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_and_records_state_the_same_names(name: str) -> None:
    loaded = schema(name)
    for definition, record in DEFS.items():
        if definition in loaded["$defs"]:
            stated = set(loaded["$defs"][definition]["properties"])
            assert stated == {f.name for f in dataclasses.fields(record)}, definition


def test_top_level_records_state_the_names_of_their_schema() -> None:
    for record, name in SCHEMA_OF.items():
        assert set(schema(name)["properties"]) == {f.name for f in dataclasses.fields(record)}


def test_definitions_shared_by_schemas_are_equal() -> None:
    seen: dict[str, object] = {}
    for name in SCHEMAS:
        for key, definition in schema(name)["$defs"].items():
            assert seen.setdefault(key, definition) == definition, (name, key)


@pytest.mark.parametrize(
    "name", ["result", "case", "outcome", "proof", "site", "state", "pair", "variant", "capability"]
)
def test_enumerations_match_the_literals(name: str) -> None:
    owner = "compare" if name == "pair" else "results"
    properties = schema(owner)["$defs"][name]["properties"]
    for field, hint in typing.get_type_hints(DEFS[name]).items():
        if typing.get_origin(hint) is typing.Literal:
            assert set(properties[field]["enum"]) == set(typing.get_args(hint)), field


FULL = ResultsRecord(
    machine=MACHINE,
    results=(
        dataclasses.replace(
            PASS,
            forms={"onnx": 6},
            workload={"batch": 2},
            placement=PlacementRecord(float_compute_nodes=3, on_target=2, elsewhere=("a -> CPU",)),
            parity=ParityRecord(
                against="float64",
                max_abs=math.inf,
                cosine=math.nan,
                by_case=(CaseRecord(name="holes", status="fail", max_abs=0.5, bound=1e-6),),
                first_difference=DifferenceRecord(site="attn.0", stage="mask", message="m"),
            ),
            latency_ms=LatencyRecord(p10=1, p50=2, p90=3, p99=4, n=9, warmup=2, timer="t"),
            vs=RatioRecord(baseline="raw", ratio=0.8, low=0.79, high=0.82),
        ),
    ),
    exports=(
        ExportRecord(
            model=ModelRecord(name="m", sha256="0" * 64, opsets={"": 23}, nodes=4),
            sites=(
                SiteRecord(id="attn.0", verdict="attention", spec=SPEC.to_json(), nodes=("n",)),
                SiteRecord(
                    id="softmax.1",
                    verdict="rejected",
                    reason=ReasonRecord(code="c", message="m", nodes=("n",)),
                ),
            ),
            variants=(
                VariantRecord(
                    target="cpu",
                    file="cpu.onnx",
                    dtype="fp32",
                    opset=23,
                    sites={
                        "attn.0": SiteOutcomeRecord(
                            form="onnx",
                            params={"opset": 23},
                            status="fused",
                            proof=ProofRecord(
                                engine="e",
                                against=("oracle", "original"),
                                cases=1,
                                max_err=1e-7,
                                bound=1e-6,
                                by_case=(
                                    ProofCaseRecord(
                                        name="holes", status="pass", max_err=1e-7, bound=1e-6
                                    ),
                                ),
                            ),
                        )
                    },
                ),
            ),
        ),
    ),
    doctor=DoctorRecord(
        machine=MACHINE,
        targets=(
            TargetRecord(
                target="cpu",
                build=StateRecord(status="available"),
                run=StateRecord(status="unavailable", reason="r", fix="f"),
                capabilities=(
                    CapabilityRecord(form="onnx", feature="softcap", dtype="fp32", state="ok"),
                ),
            ),
        ),
    ),
)
COMPARISON = ComparisonRecord(
    a=SideRecord(model="a", sha256="0", engine="e"),
    b=SideRecord(model="b", sha256="1", engine="e"),
    equal=True,
    sites=(SitePairRecord(a="attn.0", b=None, status="unmatched"),),
)


@pytest.mark.parametrize("record", [FULL, FULL.exports[0], FULL.doctor, COMPARISON], ids=type)
def test_a_written_record_reads_back_equal(record: Record, tmp_path: Path) -> None:
    path = write_json(tmp_path / "r.json", record)
    again = read_record(path, type(record))
    assert again.to_json() == record.to_json()
    assert write_json(tmp_path / "s.json", again).read_bytes() == path.read_bytes()
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_an_inspection_is_an_export_without_variants() -> None:
    validate("inspect", dataclasses.replace(FULL.exports[0], variants=()).to_json())


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.floats(), st.lists(st.text(max_size=3), max_size=3))
def test_any_figure_survives_json(number: float, words: list[str]) -> None:
    record = ParityRecord(against="x", max_abs=number, ensemble=tuple(words))
    text = json.dumps(record.to_json(), allow_nan=False)
    again = ParityRecord.from_json(json.loads(text))
    assert again.ensemble == tuple(words)
    assert again.max_abs == number or (math.isnan(number) and math.isnan(again.max_abs or 0))


def _file(folder: Path, name: str, data: object) -> Path:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def test_an_older_file_still_merges(tmp_path: Path) -> None:
    now = FULL.to_json()
    old = {**now, "schema_version": "0.9", "export": now["exports"][0]}
    del old["exports"]
    old["export"] = {**old["export"], "schema_version": 0}
    loaded = read_results([_file(tmp_path, "old.json", old)])
    assert loaded.results[0][1].to_json() == now
    assert not loaded.damaged


def test_a_later_minor_version_reads_and_a_later_major_does_not(tmp_path: Path) -> None:
    data = {**FULL.to_json(), "schema_version": "1.7", "new_name": 1}
    again = read_record(_file(tmp_path, "a.json", data), ResultsRecord)
    assert again.to_json()["results"] == FULL.to_json()["results"]
    data["schema_version"] = "2.0"
    with pytest.raises(InputError, match=r"2\.0 is later than"):
        read_record(_file(tmp_path, "b.json", data), ResultsRecord)
    with pytest.raises(InputError, match=r"2\.0 is later than") as caught:
        read_results([tmp_path / "b.json"])
    assert caught.value.fix == "upgrade mha-export"


OUT_OF_ORDER = {"p10": 2, "p50": 1, "p90": 3, "p99": 4, "n": 1, "warmup": 0, "timer": "t"}
DAMAGE = {
    "empty": "",
    "cut short": '{"schema_version": "1.0", "mach',
    "not an object": "[]",
    "no version": {"results": []},
    "version is a word": {**FULL.to_json(), "schema_version": "latest"},
    "unknown status": {**FULL.to_json(), "results": [{**PASS.to_json(), "status": "ok"}]},
    "percentiles out of order": {
        **FULL.to_json(),
        "results": [
            {
                **PASS.to_json(),
                "latency_ms": OUT_OF_ORDER,
            }
        ],
    },
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_named_and_left_out(damage: object, tmp_path: Path) -> None:
    good = write_json(tmp_path / "good.json", FULL)
    bad = _file(tmp_path, "bad.json", damage)
    loaded = read_results([bad, good])
    assert [path for path, _ in loaded.results] == [good]
    assert [d.path for d in loaded.damaged] == [bad]
    assert "bad.json" in loaded.damaged[0].reason or "percentiles" in loaded.damaged[0].reason
    with pytest.raises(InputError, match="no results file can be used"):
        read_results([bad, tmp_path / "missing.json"])


def test_an_export_beside_the_results_is_taken_in(tmp_path: Path) -> None:
    results = write_json(tmp_path / "r.json", dataclasses.replace(FULL, exports=()))
    write_json(tmp_path / "export.json", FULL.exports[0])
    assert read_results([results]).results[0][1].exports == (read_export(tmp_path / "export.json"),)


def test_an_export_of_another_model_beside_the_results_is_not(tmp_path: Path) -> None:
    results = write_json(tmp_path / "r.json", dataclasses.replace(FULL, exports=()))
    other = dataclasses.replace(FULL.exports[0].model, sha256="f" * 64)
    write_json(tmp_path / "export.json", dataclasses.replace(FULL.exports[0], model=other))
    assert read_results([results]).results[0][1].exports == ()


def test_a_broken_record_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("before")
    broken = dataclasses.replace(FULL, results=(dataclasses.replace(PASS, status="ok"),))
    with pytest.raises(InputError, match=r"results\[0\]\.status"):
        write_json(path, broken)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_json(tmp_path / "none" / "r.json", FULL)
