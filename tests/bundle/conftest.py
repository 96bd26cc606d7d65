"""Small bundles, and where the programs that run their examples are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from mha_export.decode import KEY, CacheLayout, CacheTensor
from mha_export.jobs import ExportSettings, build_graph, export_model
from mha_export.jobs.bundle import BundleSettings, bundle_export
from mha_export.spec import AttentionSpec, EmptyRow, MaskSpec, ProjectionSpec
from mha_export.targets import Unavailable, target_named
from mha_export.targets._node import modules_folder

ENCODER = AttentionSpec(
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    mask=MaskSpec(padding=True, fill="min", empty_row=EmptyRow.UNIFORM),
    projections=ProjectionSpec(d_model=32, q_bias=True, k_bias=True, v_bias=True),
    q_len="seq",
    kv_len="seq",
)


PLAIN = ENCODER.replace(kv_heads=4, mask=MaskSpec())


def make_export(
    folder: Path, *targets: str, form: str | None = None, spec: AttentionSpec = ENCODER
) -> Path:
    model = folder / "encoder.onnx"
    build_graph(spec, output=model, flags={"weights": "random", "form": "primitive"})
    settings = ExportSettings(form=form)
    result = export_model(model, targets=targets, out=folder / "export", settings=settings)
    assert result.ok, result.notices
    return folder / "export"


@pytest.fixture(scope="session")
def exporter() -> Callable[..., Path]:
    return make_export


@pytest.fixture(scope="session")
def plain() -> AttentionSpec:
    """An encoder without a mask."""
    return PLAIN


@pytest.fixture(scope="session")
def export_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_export(tmp_path_factory.mktemp("export"), "cpu", "directml", "portable")


@pytest.fixture(scope="session")
def made(export_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the encoder, with its zip beside it: not to be changed."""
    out = tmp_path_factory.mktemp("bundles") / "encoder"
    result = bundle_export(export_dir, out=out, settings=BundleSettings(archive=True))
    assert result.ok
    return out


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    """A copy to break, in a folder that is not the project's."""
    shutil.copytree(made, tmp_path / "app")
    shutil.copyfile(f"{made}.zip", tmp_path / "app.zip")
    return tmp_path / "app"


CORPUS = Path(__file__).parents[2] / "graphs" / "corpus"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama that keeps a concat cache."""
    model = ir.load(CORPUS / "llama_kv-sdpa.dynamo.18.onnx")
    names = [f"{kind}_{layer}" for layer in range(2) for kind in ("key", "value")]
    layout = CacheLayout(
        growth="concat",
        tensors=tuple(
            CacheTensor(past=f"past_{name}", present=f"present_{name}", axis=2, heads=2, dim=16)
            for name in names
        ),
        tokens=("input_ids",),
        positions="position_ids",
        mask="attention_mask",
        logits="y",
    )
    model.metadata_props[KEY] = layout.to_text()
    path = tmp_path_factory.mktemp("llama") / "llama.onnx"
    ir.save(model, path)
    return path


def of_fixed_length(model: ir.Model, length: int) -> None:
    """Make the buffers of a static cache ``length`` tokens long, as some exporters do."""
    layout = CacheLayout.from_metadata(model.metadata_props)
    assert layout is not None
    (free,) = {
        value.shape[layout.tensors[0].axis]
        for value in model.graph.inputs
        if value.name == layout.tensors[0].past and value.shape is not None
    }
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        sizes = [length if size == free else size for size in value.shape]
        value.shape = ir.Shape(sizes)


@pytest.fixture(scope="session")
def decoder(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the Llama with its concat cache: not to be changed."""
    folder = tmp_path_factory.mktemp("decoder")
    result = export_model(llama, targets=["cpu", "portable"], out=folder / "export")
    assert result.ok, result.notices
    (folder / "config.json").write_text(
        '{"model_type": "llama", "eos_token_id": 2, "vocab_size": 64, "hidden_size": 64, '
        '"num_attention_heads": 4, "max_position_embeddings": 64}'
    )
    wanted = BundleSettings(genai=folder / "config.json")
    assert bundle_export(folder / "export", out=folder / "llama", settings=wanted).ok
    return folder / "llama"


@pytest.fixture(scope="session")
def static_decoder(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the Llama with a static cache, whose length is free."""
    folder = tmp_path_factory.mktemp("static")
    settings = ExportSettings(cache="static")
    result = export_model(
        llama, targets=["cpu", "portable"], out=folder / "export", settings=settings
    )
    assert result.ok, result.notices
    assert bundle_export(folder / "export", out=folder / "llama").ok
    return folder / "llama"


@pytest.fixture(scope="session")
def fixed_decoder(static_decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the Llama with a static cache of 18 tokens: 13 follow the prompt."""
    folder = tmp_path_factory.mktemp("fixed")
    model = ir.load(static_decoder / "model" / "portable.onnx")
    of_fixed_length(model, 18)
    ir.save(model, folder / "llama.onnx", external_data="llama.data")
    result = export_model(folder / "llama.onnx", targets=["cpu", "portable"], out=folder / "export")
    assert result.ok, result.notices
    assert bundle_export(folder / "export", out=folder / "llama").ok
    return folder / "llama"


@pytest.fixture
def needs() -> Callable[[str], None]:
    """``needs(name)``: skip where an optional target or program is absent, fail where required."""
    required = os.environ.get("MHA_EXPORT_REQUIRED_TARGETS", "cpu,reference,openvino").split(",")

    def check(name: str) -> None:
        if name == "cmake":
            absent = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]
            reason, must = f"{', '.join(absent)} not on the PATH", "openvino" in required
            if not absent:
                return
        else:
            state = target_named(name).availability().run
            if not isinstance(state, Unavailable):
                return
            reason, must = f"target {name}: {state.reason}; {state.fix}", name in required
        if must:
            pytest.fail(f"required here: {reason}")
        pytest.skip(reason)

    return check


@pytest.fixture
def with_modules() -> Callable[[Path], Path]:
    """Put the npm packages where a bundle's ``npm install`` would, without a network."""

    def link(bundle: Path) -> Path:
        link = bundle / "examples" / "javascript" / "node_modules"
        link.symlink_to(modules_folder() / "node_modules", target_is_directory=True)
        return bundle

    return link
