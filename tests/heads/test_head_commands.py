"""The three commands: what they write, and that bad input writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mha_export.cli._group import cli
from mha_export.errors import MhaExportError
from mha_export.jobs import HeadOptions, PruneGoal, prune_model, regroup_model
from mha_export.report.records import HeadsRecord, SurgeryRecord, read_record

CORPUS = Path(__file__).parents[2] / "graphs" / "corpus"


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli, [str(part) for part in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_heads_then_a_page(encoder_file: Path, encoder_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    out = tmp_path / "heads.json"
    run("heads", encoder_file, "--data", encoder_data, "-o", out)
    record = read_record(out, HeadsRecord)
    (layer,) = record.layers
    assert len(layer.heads) == 4
    assert all(head.importance is not None and head.qk_rank == 8 for head in layer.heads)
    assert all(0 <= (head.entropy_share or 0) <= 1 for head in layer.heads)
    run("report", out, "-o", tmp_path / "heads.html")
    page = (tmp_path / "heads.html").read_text(encoding="utf-8")
    assert 'id="heads"' in page
    assert "Layer 0, head" in page


def test_prune_by_fraction_with_both_orders(
    encoder_file: Path, encoder_data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "half.onnx"
    run("prune", encoder_file, "--fraction", 0.5, "--compare", "--data", encoder_data, "-o", out)
    record = read_record(out.with_suffix(".json"), SurgeryRecord)
    assert record.heads_before == 4
    assert record.heads_after == 2
    assert record.check_max_abs is not None
    assert record.check_max_abs <= 1e-5
    assert set(record.curves) == {"greedy", "one-shot"}
    assert record.bytes_after < record.bytes_before


def test_prune_without_data_says_how(encoder_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "half.onnx"
    result = prune_model(
        encoder_file, goal=PruneGoal(fraction=0.25), options=HeadOptions(), output=out
    )
    assert "norm" in result.document["how"]
    assert result.document["heads_after"] == 3


def test_prune_to_a_quality(encoder_file: Path, encoder_data: Path, tmp_path: Path) -> None:
    result = prune_model(
        encoder_file,
        goal=PruneGoal(min_quality=0.2),
        options=HeadOptions(data=encoder_data),
        output=tmp_path / "p.onnx",
    )
    points = result.document["curves"]["greedy"]
    kept = 4 - result.document["heads_after"]
    assert points[kept - 1]["quality"] >= 0.2
    assert all(point["quality"] < 0.2 for point in points[kept:])


def test_regroup_tells_the_cache(encoder_file: Path, encoder_data: Path, tmp_path: Path) -> None:
    result = regroup_model(
        encoder_file,
        kv_heads=2,
        options=HeadOptions(data=encoder_data),
        output=tmp_path / "grouped.onnx",
    )
    document = result.document
    assert document["cache_bytes_before"] == 2 * document["cache_bytes_after"]
    assert set(document["quality_other"]) == {"similar", "contiguous"}


BAD = [
    (["prune", "--heads", "0:0,0:1,0:2,0:3"], "all heads of all layers"),
    (["prune", "--heads", "0:7"], "has no head 7"),
    (["prune", "--heads", "5:0"], "there is no layer 5"),
    (["prune", "--heads", "first"], "is no head"),
    (["prune"], "0 goals are stated"),
    (["prune", "--fraction", "0.5", "--min-quality", "0.9"], "2 goals are stated"),
    (["prune", "--fraction", "1.5"], "expected above 0"),
    (["prune", "--min-quality", "0.9"], "there are none"),
    (["prune", "--fraction", "0.5", "--data", "absent.npz"], "no such file"),
    (["regroup", "--kv-heads", "3"], "doesn't divide"),
    (["regroup", "--kv-heads", "4"], "already"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_writes_nothing(
    arguments: list[str], words: str, encoder_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    command, *options = arguments
    runner = CliRunner()
    with pytest.raises(MhaExportError, match=words) as caught:
        runner.invoke(
            cli,
            [command, str(encoder_file), *options, "-o", str(folder / "x.onnx")],
            catch_exceptions=False,
        )
    assert caught.value.exit_code == 2
    assert not list(folder.iterdir())


def test_data_without_an_input(encoder_file: Path, tmp_path: Path) -> None:
    data = tmp_path / "tokens.jsonl"
    data.write_text(json.dumps({"input_ids": [1, 2, 3]}) + "\n", encoding="utf-8")
    with pytest.raises(MhaExportError, match="holds nothing for the model's input"):
        CliRunner().invoke(
            cli, ["heads", str(encoder_file), "--data", str(data)], catch_exceptions=False
        )


def test_a_layer_that_is_not_its_own(tmp_path: Path) -> None:
    """The keys of its heads are not one linear layer: refused, and nothing is written."""
    (file,) = CORPUS.glob("deepseek_v3-eager.*.onnx")
    out = tmp_path / "x.onnx"
    with pytest.raises(MhaExportError, match=r"can't be removed"):
        CliRunner().invoke(
            cli, ["prune", str(file), "--heads", "0:0", "-o", str(out)], catch_exceptions=False
        )
    assert not list(tmp_path.iterdir())
