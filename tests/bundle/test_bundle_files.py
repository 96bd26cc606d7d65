"""What is in a bundle, that it is the same when made again, and that no byte changes unseen."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import zipfile
from pathlib import Path

import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mha_export.bundle import Manifest, check_files, open_bundle, read_answers, read_manifest
from mha_export.bundle._embedding import options_of, preference, runs_on, version_numbers
from mha_export.bundle._manifest import (
    AnswerCase,
    FileRecord,
    GenerationRecord,
    MobileRecord,
    RunsOnRecord,
    TensorRecord,
    ValueRecord,
    VariantEntry,
    damage_of,
)
from mha_export.errors import InputError
from mha_export.jobs import inspect_bundle, verify_bundle
from mha_export.jobs.bundle import BundleSettings, bundle_export
from mha_export.report.records._files import schema


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_is_in_it(made: Path) -> None:
    manifest = read_manifest(made)
    targets = [variant.target for variant in manifest.variants]
    assert targets == ["directml", "cpu", "portable"]
    assert set(manifest.files) == set(tree(made)) - {"manifest.json"}
    assert {value.name: value.role for value in manifest.inputs}["key_padding"] == "mask"
    for variant in manifest.variants:
        assert variant.runs_on, variant.target
        model = ir.load(made / variant.file)
        assert dict(model.graph.opset_imports) == dict(variant.opsets)
        nodes = {node.name for node in model.graph}
        assert variant.attention_nodes
        assert set(variant.attention_nodes) <= nodes
        assert variant.evidence["proofs"]["sites"] == 1
    assert manifest.cache is None
    assert [case.name for case in manifest.answers] == ["ordinary", "holes", "longer"]
    assert max(t.shape[1] for case in manifest.answers for t in case.inputs) >= 32


def test_the_fused_node_says_what_it_is(made: Path) -> None:
    model = ir.load(made / "model" / "cpu.onnx")
    node = next(node for node in model.graph if node.op_type == "Attention")
    assert node.name is not None
    assert node.name.startswith(node.metadata_props["mha_export.site"])
    assert json.loads(node.metadata_props["mha_export.spec"])["q_heads"] == 4
    assert json.loads(node.metadata_props["mha_export.form"])["form"] == "onnx"
    assert node.metadata_props["mha_export.origin"]


def test_the_same_bytes_again(export_dir: Path, made: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    bundle_export(export_dir, out=again, settings=BundleSettings(archive=True))
    assert tree(again) == tree(made)
    assert (tmp_path / "again.zip").read_bytes() == Path(f"{made}.zip").read_bytes()


def test_a_zip_alone_is_the_zip_of_the_folder(export_dir: Path, made: Path, tmp_path: Path) -> None:
    bundle_export(export_dir, out=tmp_path / "alone.zip")
    assert (tmp_path / "alone.zip").read_bytes() == Path(f"{made}.zip").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["alone.zip"]


def test_into_an_earlier_bundle_nothing_of_it_stays(export_dir: Path, bundle: Path) -> None:
    bundle_export(export_dir, out=bundle, settings=BundleSettings(targets=("cpu",)))
    assert not (bundle / "model" / "directml.onnx").exists()
    assert [path.name for path in bundle.parent.iterdir() if path.is_dir()] == [bundle.name]
    assert [variant.target for variant in read_manifest(bundle).variants] == ["cpu", "portable"]
    assert set(tree(bundle)) == {*read_manifest(bundle).files, "manifest.json"}


def test_extras(export_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "LICENSE.txt").write_text("free")
    wanted = BundleSettings(
        targets=("cpu",),
        single_files=("portable",),
        mobile=True,
        licenses=(tmp_path / "LICENSE.txt",),
    )
    bundle_export(export_dir, out=tmp_path / "app", settings=wanted)
    bundle_export(export_dir, out=tmp_path / "again", settings=wanted)
    one, other = tree(tmp_path / "app"), tree(tmp_path / "again")
    # ONNX Runtime's writer of this format goes through hash tables whose order changes by the run.
    for files in (one, other):
        del files["model/mobile.ort"]
    stated = [json.loads(files.pop("manifest.json")) for files in (one, other)]
    for document in stated:
        del document["sha256"], document["files"]["model/mobile.ort"]
    assert stated[0] == stated[1]
    assert one == other
    manifest = read_manifest(tmp_path / "app")
    assert manifest.licenses == ("licenses/LICENSE.txt",)
    assert manifest.mobile is not None
    alone = tmp_path / "alone"
    alone.mkdir()
    portable = manifest.variants[-1]
    assert portable.single_file is not None
    for name in (portable.single_file, manifest.mobile.file):
        shutil.copy(tmp_path / "app" / name, alone)
    import onnxruntime as ort

    for path in alone.iterdir():  # with nothing beside it
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        case = read_answers(tmp_path / "app", manifest.answers)[0]
        outputs = session.run(None, dict(case.inputs))
        names = [value.name for value in session.get_outputs()]
        assert case.judge(dict(zip(names, outputs, strict=True)))[0] == "pass"


def flipped(good: bytes, at: int, by: int = 1) -> bytes:
    return good[:at] + bytes([good[at] ^ by]) + good[at + 1 :]


def test_a_byte_changed_in_any_file_is_named(made: Path) -> None:
    """Every file of the bundle: its first byte, its last, and some between."""
    choose = random.Random(0)
    for name, good in tree(made).items():
        places = {0, len(good) - 1, *(choose.randrange(len(good)) for _ in range(3))}
        for at in sorted(places):
            try:
                (made / name).write_bytes(flipped(good, at, choose.randint(1, 255)))
                result = verify_bundle(made, files_only=True)
            finally:
                (made / name).write_bytes(good)
            assert result.exit_code == 1
            assert [problem["file"] for problem in result.document["problems"]] == [name], at


def test_every_byte_of_the_manifest_counts(made: Path) -> None:
    """Nothing else holds a hash of the manifest, so it is tried byte by byte."""
    good = (made / "manifest.json").read_bytes()
    assert damage_of(good) is None
    assert [at for at in range(len(good)) if damage_of(flipped(good, at)) is None] == []


def problems_of_zip(folder: Path, data: bytes) -> list[str]:
    (folder / "app.zip").write_bytes(data)
    result = verify_bundle(folder / "app.zip", files_only=True)
    assert result.exit_code == (1 if result.document["problems"] else 0)
    return [problem["file"] for problem in result.document["problems"]]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_byte_changed_anywhere_in_the_zip_is_named(
    made: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    good = Path(f"{made}.zip").read_bytes()
    # Names, sizes and offsets are where a reader could be led astray: the directory at the end.
    place = data.draw(st.sampled_from(["anywhere", "directory", "first header"]))
    lowest, highest = {
        "anywhere": (0, len(good) - 1),
        "directory": (good.index(b"PK\x01\x02"), len(good) - 1),
        "first header": (0, 80),
    }[place]
    at, by = data.draw(st.integers(lowest, highest)), data.draw(st.integers(1, 255))
    named = problems_of_zip(tmp_path_factory.mktemp("zip"), flipped(good, at, by))
    assert {*tree(made), "app.zip"} & set(named)


@pytest.mark.slow
def test_the_bytes_of_the_zip_that_are_not_content_count(made: Path, tmp_path: Path) -> None:
    """Headers and directory, every seventh byte of them; content is covered by its hashes."""
    good = Path(f"{made}.zip").read_bytes()
    with zipfile.ZipFile(f"{made}.zip") as archive:
        ends = [*[info.header_offset for info in archive.infolist()][1:], archive.start_dir]
        sizes = [info.file_size for info in archive.infolist()]
    content: set[int] = set()
    for end, size in zip(ends, sizes, strict=True):
        content.update(range(end - size, end))
    known = {*tree(made), "app.zip"}
    for at in sorted(set(range(len(good))) - content)[::7]:
        assert known & set(problems_of_zip(tmp_path, flipped(good, at))), at


def test_whole_folder_and_zip_pass(bundle: Path) -> None:
    for path in (bundle, bundle.with_suffix(".zip")):
        result = verify_bundle(path, files_only=True)
        assert result.ok
        assert result.document["problems"] == []


def test_a_missing_file_and_a_missing_manifest_are_named(bundle: Path) -> None:
    (bundle / "model" / "weights.bin").unlink()
    (problem,) = verify_bundle(bundle).document["problems"]
    assert problem == {"file": "model/weights.bin", "reason": "missing"}
    (bundle / "manifest.json").unlink()
    (problem,) = verify_bundle(bundle).document["problems"]
    assert problem == {"file": "manifest.json", "reason": "missing"}


def test_a_manifest_changed_with_care_still_shows(bundle: Path) -> None:
    """Its own hash put right, another file's wrong."""
    path = bundle / "manifest.json"
    document = json.loads(path.read_bytes())
    document["files"]["README.md"]["sha256"] = "0" * 64
    from mha_export.bundle._manifest import manifest_bytes

    path.write_bytes(manifest_bytes(Manifest.from_json(document)))
    assert damage_of(path.read_bytes()) is None
    (problem,) = verify_bundle(bundle).document["problems"]
    assert problem["file"] == "README.md"


def test_what_lies_beside_is_told_and_is_no_failure(bundle: Path) -> None:
    (bundle / "model" / "mine.onnx").write_bytes(b"x")
    (bundle / "examples" / "build").mkdir()
    checked = check_files(bundle)
    assert not checked.problems
    assert checked.notes == ("model/mine.onnx is not part of the bundle",)


def test_known_answers_on_the_targets_that_are_here(bundle: Path) -> None:
    result = verify_bundle(bundle, targets=["cpu", "portable"])
    assert result.ok, result.document
    assert [(row["variant"], row["status"]) for row in result.document["answers"]] == [
        ("cpu", "pass"),
        ("portable", "pass"),
    ]


def test_a_target_that_is_not_here_is_3(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MHA_EXPORT_DIRECTML_LAB", str(tmp_path / "none"))
    monkeypatch.setattr("platform.system", lambda: "Linux")
    result = verify_bundle(bundle, targets=["directml"])
    assert result.exit_code == 3
    assert result.document["answers"][0]["status"] == "unavailable"


def test_inspect_says_what_is_in_it(bundle: Path) -> None:
    for path in (bundle, bundle.with_suffix(".zip")):
        assert inspect_bundle(path).document == json.loads((bundle / "manifest.json").read_bytes())


def test_portable_is_made_where_the_export_has_none(
    tmp_path: Path, export_dir: Path, made: Path
) -> None:
    shutil.copytree(export_dir, tmp_path / "export")
    path = tmp_path / "export" / "export.json"
    record = json.loads(path.read_text())
    record["variants"] = [v for v in record["variants"] if v["target"] == "cpu"]
    path.write_text(json.dumps(record))
    (tmp_path / "export" / "portable.onnx").unlink()
    bundle_export(tmp_path / "export", out=tmp_path / "app")
    portable = read_manifest(tmp_path / "app").variants[-1]
    assert portable.target == "portable"
    assert portable.forms == {"portable": 1}
    assert verify_bundle(tmp_path / "app", targets=["portable"]).ok


def bad_inputs(tmp_path: Path, export_dir: Path) -> dict[str, tuple[dict[str, object], str]]:
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    cut = tmp_path / "cut"
    shutil.copytree(export_dir, cut)
    (cut / "directml.onnx").unlink()
    out = tmp_path / "app"

    def of(**more: object) -> dict[str, object]:
        return {"export_dir": export_dir, "out": out, **more}

    return {
        "no export": (of(export_dir=tmp_path / "none"), "not an export folder"),
        "export with a graph missing": (of(export_dir=cut), "directml.onnx is missing"),
        "out is a file": (of(out=tmp_path / "file"), "is a file"),
        "out holds other files": (of(out=tmp_path / "other"), "holds other files (notes.txt)"),
        "zip in no folder": (of(out=tmp_path / "no" / "app.zip"), "is no folder"),
        "unknown target": (
            of(settings=BundleSettings(targets=("qnn",))),
            "no graph for target qnn",
        ),
        "single file of none": (
            of(settings=BundleSettings(single_files=("cuda",))),
            "holds no such variant",
        ),
        "no licence file": (
            of(settings=BundleSettings(licenses=(tmp_path / "nothing",))),
            "no such file",
        ),
        "genai of an encoder": (
            of(settings=BundleSettings(genai=config(tmp_path))),
            "keeps no cache",
        ),
        "genai without a config": (
            of(settings=BundleSettings(genai=tmp_path / "nothing")),
            "--genai",
        ),
    }


def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text("{}")
    return path


def test_bad_input_is_one_message_and_nothing_half_written(
    tmp_path: Path, export_dir: Path
) -> None:
    for name, (arguments, words) in bad_inputs(tmp_path, export_dir).items():
        with pytest.raises(InputError) as caught:
            bundle_export(**arguments)  # type: ignore[arg-type]
        assert words in str(caught.value), name
        assert not (tmp_path / "app").exists(), name
        assert not list(tmp_path.glob(".*")), name
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("kind", ["nothing there", "empty folder", "another file"])
def test_no_bundle_is_bad_input(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "app"
    if kind == "empty folder":
        path.mkdir()
    elif kind == "another file":
        path.write_text("text")
    with pytest.raises(InputError):
        verify_bundle(path)


def test_a_zip_cannot_write_outside(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("../outside.txt", "x")
    with open_bundle(tmp_path / "app.zip") as opened:
        assert [problem.file for problem in opened.problems] == ["../outside.txt"]
        assert not (opened.folder.parent / "outside.txt").exists()


RECORDS = {
    "file": FileRecord,
    "value": ValueRecord,
    "place": RunsOnRecord,
    "entry": VariantEntry,
    "tensor": TensorRecord,
    "case": AnswerCase,
    "generation": GenerationRecord,
    "mobile": MobileRecord,
}


def test_schema_and_records_state_the_same_names() -> None:
    stated = schema("bundle")
    assert set(stated["properties"]) == {f.name for f in dataclasses.fields(Manifest)}
    for name, record in RECORDS.items():
        properties = set(stated["$defs"][name]["properties"])
        assert properties == {f.name for f in dataclasses.fields(record)}, name


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1.30.0", (1, 30, 0)),
        ("2026.4.0-19952-abc", (2026, 4, 0)),
        ("1.24.0.dev1", (1, 24, 0)),
        ("1.32.0 (plugin)", (1, 32, 0)),
        ("none", ()),
    ],
)
def test_versions_are_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert version_numbers(text) == numbers


@pytest.mark.parametrize(
    ("opset", "ir_version", "minimum"),
    [(18, 8, "1.19"), (21, 10, "1.19"), (22, 10, "1.21"), (23, 11, "1.23"), (24, 11, "1.24")],
)
def test_oldest_version_by_opset(opset: int, ir_version: int, minimum: str) -> None:
    assert {p.minimum for p in runs_on("cpu", opset=opset, ir_version=ir_version)} == {minimum}


def test_every_target_has_a_place() -> None:
    """A new target without one would be in bundles that no app can choose it from."""
    from mha_export.targets import all_targets

    for name in all_targets():
        assert runs_on(name, opset=20, ir_version=10), name
        assert preference(name) < preference("portable")
    assert options_of("openvino", dtype="fp16") == {"openvino": {"INFERENCE_PRECISION_HINT": "f16"}}
