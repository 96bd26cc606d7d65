"""The golden graphs of graphs/golden: readable, and what the builder gives today."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import onnx
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "graphs" / "golden"
NAMES = sorted(path.name for path in FOLDER.glob("*.onnxtxt"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = str(ROOT / "scripts" / "regenerate_goldens")
    loader = importlib.machinery.SourceFileLoader("regenerate_goldens", path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_every_golden_is_what_the_builder_gives(script: ModuleType) -> None:
    made = script.goldens()
    assert sorted(made) == NAMES, "run scripts/regenerate_goldens"
    for name in NAMES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert made[name] == text, f"{name} differs: run scripts/regenerate_goldens and look"


def test_the_set_stays_small() -> None:
    assert 0 < len(NAMES) <= 30
    assert sum((FOLDER / name).stat().st_size for name in NAMES) < 100_000


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_is_a_valid_model(name: str) -> None:
    model = onnx.parser.parse_model((FOLDER / name).read_text(encoding="utf-8"))
    onnx.checker.check_model(model)


@pytest.mark.parametrize("preset", ["llama-3-8b", "deepseek-v3-mla-absorbed", "t5-base"])
def test_a_reduced_preset_keeps_its_features(script: ModuleType, preset: str) -> None:
    full = script.load_preset(preset)
    small = script.reduced(full)
    assert small.mask.parts == full.mask.parts
    assert small.effective_scale == full.effective_scale or full.scale is None
    assert (small.group > 1) == (full.group > 1)
    assert (small.rotary is None) == (full.rotary is None)
