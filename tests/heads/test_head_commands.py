"""The three commands: what they write, and that bad input writes nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from click.testing import CliRunner

from mha_export.cli._group import cli
from mha_export.errors import InputError, MhaExportError
from mha_export.heads.data import read_samples
from mha_export.heads.surgery import Pruned
from mha_export.jobs import HeadOptions, PruneGoal, SourceSettings, prune_model, regroup_model
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


def one_ms_a_head(opened: object, pruned: Pruned) -> dict[str, float]:
    """In place of a clock: the whole encoder takes 10 ms, and each head that goes saves one."""
    return {"original": 10.0, "pruned": 10.0 - len(pruned.removed)}


@pytest.mark.parametrize("goal", [9.0, 8.5, 7.0])
def test_prune_to_a_latency_removes_no_more_than_it_must(
    goal: float, encoder_file: Path, encoder_data: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("mha_export.jobs.prune.timed", one_ms_a_head)
    result = prune_model(
        encoder_file,
        goal=PruneGoal(max_latency_ms=goal),
        options=HeadOptions(data=encoder_data),
        output=tmp_path / "p.onnx",
    )
    removed = math.ceil(10.0 - goal)
    assert result.document["heads_after"] == 4 - removed
    assert result.document["latency_ms"] == {"original": 10.0, "pruned": 10.0 - removed}


def test_a_latency_out_of_reach(
    encoder_file: Path, encoder_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mha_export.jobs.prune.timed", one_ms_a_head)
    with pytest.raises(MhaExportError, match="with 3 heads gone the model still takes 7 ms"):
        prune_model(
            encoder_file,
            goal=PruneGoal(max_latency_ms=5.0),
            options=HeadOptions(data=encoder_data),
            output=tmp_path / "p.onnx",
        )
    assert not list(tmp_path.iterdir())


def test_prune_times_both_models(encoder_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.onnx"
    run("prune", encoder_file, "--heads", "0:1", "--time", "-o", out)
    record = read_record(out.with_suffix(".json"), SurgeryRecord)
    assert set(record.latency_ms) == {"original", "pruned"}
    assert all(value > 0 for value in record.latency_ms.values())


def test_regroup_tells_the_cache(encoder_file: Path, encoder_data: Path, tmp_path: Path) -> None:
    result = regroup_model(
        encoder_file,
        kv_heads=2,
        options=HeadOptions(data=encoder_data),
        output=tmp_path / "grouped.onnx",
    )
    document = result.document
    assert document["cache_bytes_before"] == 2 * document["cache_bytes_after"]
    assert document["quality"] == max(document["quality_other"].values())
    assert set(document["quality_other"]) == {"similar", "contiguous"}


@pytest.mark.parametrize("better", ["similar", "contiguous"])
def test_regroup_writes_the_better_grouping(
    better: str, encoder_file: Path, encoder_data: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whichever it is: the quality of a grouping is made up by which heads it averages."""
    next_to_each_other = ((0, 1), (2, 3))
    apart = ((0, 2), (1, 3))
    monkeypatch.setattr("mha_export.heads.regrouping.similar_groups", lambda *_: apart)
    monkeypatch.setattr(
        "mha_export.jobs.regroup._quality",
        lambda opened, judge, found: float(
            (found.groups[0] == next_to_each_other) == (better == "contiguous")
        ),
    )
    options = HeadOptions(data=encoder_data)
    result = regroup_model(
        encoder_file, kv_heads=2, options=options, output=tmp_path / "grouped.onnx"
    )
    document = result.document
    assert document["quality"] == 1.0
    assert better in document["how"]
    (layer,) = document["layers"]
    expected = next_to_each_other if better == "contiguous" else apart
    assert tuple(map(tuple, layer["groups"])) == expected


def test_regroup_without_data_says_what_was_averaged(encoder_file: Path, tmp_path: Path) -> None:
    output = run("regroup", encoder_file, "--kv-heads", 2, "-o", tmp_path / "grouped.onnx")
    assert "averaged in similar groups" in output
    assert "no other was compared" in output


FACTORY = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, 32)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, input_ids):
        x = self.words(input_ids)
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, 4, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(b, s, 32))

def pair():
    return Layer().eval(), {"input_ids": torch.randint(0, 50, (2, 6))}

def unnamed():
    return Layer().eval(), (torch.randint(0, 50, (2, 6)),)
"""


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    path = tmp_path / "layers.py"
    path.write_text(FACTORY, encoding="utf-8")
    return path


def test_heads_of_a_torch_module(factory: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jinja2")
    data, out = tmp_path / "ids.jsonl", tmp_path / "heads.json"
    rows = ([1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11, 12])
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows), "utf-8")
    run("heads", f"{factory}:pair", "--trust-code", "--data", data, "-o", out)
    record = read_record(out, HeadsRecord)
    assert [len(layer.heads) for layer in record.layers] == [4]
    assert all(head.importance for head in record.layers[0].heads)
    line = run("report", out, "-o", tmp_path / "heads.html").splitlines()[0]
    assert line == "PASS 4 heads of 1 model analysed: nothing was run on a target"


def test_inputs_of_a_torch_module_need_names(factory: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(MhaExportError, match=r"inputs are a tuple") as caught:
        CliRunner().invoke(
            cli, ["inspect", f"{factory}:unnamed", "--trust-code"], catch_exceptions=False
        )
    assert caught.value.exit_code == 2


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


ROW = '{"input_ids": [1, 2]}\n'
DAMAGED = [
    ("x.txt", b"\xff\xfe", "not UTF-8"),
    ("x.jsonl", b"\xff\xfe{}", "not UTF-8"),
    ("x.jsonl", f'{ROW}{{"input_ids": [1, "a"]}}'.encode(), ":2: .input_ids. is no list"),
    ("x.jsonl", f'{ROW}{{"input_ids": 1}}'.encode(), ":2: .input_ids. is no list"),
    ("x.jsonl", f'{{"input_ids": [1], "more": [1]}}\n{ROW}'.encode(), ":2: has input_ids, the f"),
    ("x.jsonl", f'{ROW}{{"input_ids": []}}'.encode(), "holds 0 numbers"),
    (
        "x.jsonl",
        f'{ROW}{{"input_ids": [1], "more": [1]}}'.encode(),
        ":2: has input_ids, more, the f",
    ),
    ("x.jsonl", b'{"input_ids": [1, 2], "attention_mask": [1]}', "holds 1 numbers, expected 2"),
]


@pytest.mark.parametrize(("name", "content", "words"), DAMAGED)
def test_damaged_data_is_one_clear_error(
    name: str, content: bytes, words: str, encoder_file: Path, tmp_path: Path
) -> None:
    data = tmp_path / name
    data.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_samples(data, ir.load(encoder_file))


def test_data_without_an_input(encoder_file: Path, tmp_path: Path) -> None:
    data = tmp_path / "tokens.jsonl"
    data.write_text(json.dumps({"input_ids": [1, 2, 3]}) + "\n", encoding="utf-8")
    with pytest.raises(MhaExportError, match="holds nothing for the model's input"):
        CliRunner().invoke(
            cli, ["heads", str(encoder_file), "--data", str(data)], catch_exceptions=False
        )


REFUSED_SOFTMAX = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[1,4,8] x, float[8,8] q, float[8,8] k, float[8,8] v) => (float[1,4,8] y) {
  queries = MatMul(x, q)
  keys = MatMul(x, k)
  values = MatMul(x, v)
  columns = Transpose<perm=[0,2,1]>(keys)
  scores = MatMul(queries, columns)
  waves = Sin(scores)
  weights = Softmax<axis=-1>(waves)
  y = MatMul(weights, values)
}
"""


@pytest.mark.parametrize(
    "arguments",
    [["prune", "--heads", "0:0"], ["prune", "--fraction", "0.5"], ["regroup", "--kv-heads", "1"]],
    ids=" ".join,
)
def test_a_refused_softmax_is_refused_with_its_reason(arguments: list[str], tmp_path: Path) -> None:
    model = tmp_path / "in.onnx"
    onnx.save(onnx.parser.parse_model(REFUSED_SOFTMAX), model)
    command, *options = arguments
    with pytest.raises(MhaExportError, match="scores-not-a-product") as caught:
        CliRunner().invoke(
            cli,
            [command, str(model), *options, "-o", str(tmp_path / "x.onnx")],
            catch_exceptions=False,
        )
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == [model]


def test_a_layer_that_is_not_its_own(tmp_path: Path) -> None:
    """The keys of its heads are not one linear layer: refused, and nothing is written."""
    (file,) = CORPUS.glob("deepseek_v3-eager.*.onnx")
    out = tmp_path / "x.onnx"
    with pytest.raises(MhaExportError, match=r"can't be removed"):
        CliRunner().invoke(
            cli, ["prune", str(file), "--heads", "0:0", "-o", str(out)], catch_exceptions=False
        )
    assert not list(tmp_path.iterdir())


def test_a_precision_is_refused_where_heads_keep_their_own(
    encoder_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="heads are not cast to fp16"):
        regroup_model(
            encoder_file,
            kv_heads=1,
            options=HeadOptions(),
            output=tmp_path / "regrouped.onnx",
            settings=SourceSettings(dtype="fp16"),
        )
