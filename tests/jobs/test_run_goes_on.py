"""A target that ends badly is its own record; a run that was ended goes on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from mha_export.cli._group import cli
from mha_export.jobs import RunSettings, run_models
from mha_export.report import open_report, verdict_of
from mha_export.report.records import validate
from mha_export.targets import _target_worker

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import misbehaving_targets as bad  # noqa: E402

QUICK = RunSettings(quick=True)
TIME_LIMIT, MEMORY_LIMIT = 10, 600

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")


@posix_only
@pytest.mark.parametrize(
    ("stage", "ending", "signal", "says", "printed"),
    [
        ("_run", "SIGSEGV", "SIGSEGV", "killed by SIGSEGV", "about to read address 0"),
        ("_run", "SIGKILL", "SIGKILL", "killed by SIGKILL", "about to be killed"),
        ("_run", "endless loop", None, f"no answer in {TIME_LIMIT} s", "about to loop"),
        ("_run", "30 GB", None, f"of {MEMORY_LIMIT} MiB", "about to allocate"),
        ("_compile", "SIGSEGV", "SIGSEGV", "build: crash", "about to read address 0"),
    ],
)
def test_a_target_that_kills_itself_is_a_record_and_the_rest_complete(
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    ending: str,
    signal: str | None,
    says: str,
    printed: str,
) -> None:
    double = {"_run": bad.run_badly, "_compile": bad.compile_badly}[stage]
    monkeypatch.setattr(_target_worker, stage, double)
    monkeypatch.setenv(bad.ENDING, ending)
    output = tmp_path / "results.json"
    limits = ["--time-limit", str(TIME_LIMIT), "--memory-limit", str(MEMORY_LIMIT)]
    arguments = ["run", str(exported), "-t", bad.VICTIM, "-t", "cpu", "--quick", "-o", str(output)]
    started = time.perf_counter()
    result = CliRunner().invoke(cli, [*arguments, *limits])
    took = time.perf_counter() - started
    assert result.exit_code == 1, result.output
    document = json.loads(output.read_text())
    validate("results", document)
    victim, other = document["results"]
    assert (victim["target"], victim["status"]) == (bad.VICTIM, "error")
    assert victim["signal"] == signal
    assert says in victim["reason"]
    assert printed in "\n".join(victim["last_output"])
    assert victim["latency_ms"] is None
    assert (other["target"], other["status"]) == ("cpu", "pass")
    assert other["latency_ms"] is not None
    assert took < 6 * TIME_LIMIT, "a hang costs its limit once, not once for every input"


ENDED = """
import os, signal, sys
from mha_export.jobs import RunSettings, run_models
def end(step):
    if step == "building for reference":
        os.kill(os.getpid(), signal.SIGKILL)
run_models(sys.argv[1], targets=["cpu", "reference"], output=sys.argv[2],
           settings=RunSettings(quick=True), progress=end)
"""


def _killed_halfway(exported: Path, output: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ENDED, exported, output], check=False, timeout=120)
    assert done.returncode == -9


@posix_only
def test_a_run_that_was_killed_goes_on_without_what_is_finished(
    exported: Path, tmp_path: Path
) -> None:
    output = tmp_path / "results.json"
    _killed_halfway(exported, output)
    left = json.loads(output.read_text())
    validate("results", left)
    assert [row["target"] for row in left["results"]] == ["cpu"]
    assert left["unfinished"]["targets"] == ["reference"]
    assert "not run yet: reference" in verdict_of(open_report([output])).line
    steps: list[str] = []
    result = run_models(
        exported,
        targets=["cpu", "reference"],
        output=output,
        settings=QUICK,
        progress=steps.append,
    )
    assert result.exit_code == 0
    assert steps[0] == f"going on with {output}, where 1 of 2 targets are done"
    assert "building for reference" in steps
    assert not [step for step in steps if "cpu" in step]
    document = json.loads(output.read_text())
    assert document == result.document
    assert document["unfinished"] is None
    assert document["results"][0] == left["results"][0]
    assert [row["target"] for row in document["results"]] == ["cpu", "reference"]


def _unfinished(exported: Path, output: Path) -> None:
    """As a run that was ended after its first target leaves it."""
    run_models(exported, targets=["cpu"], output=output, settings=QUICK)
    done = json.loads(output.read_text())
    assert done["unfinished"] is None
    output.write_text(json.dumps(done | {"unfinished": {"run": "another", "targets": ["cpu"]}}))


@pytest.mark.parametrize("left", ["finished", "another run", "cut short"])
def test_what_is_no_unfinished_file_of_this_run_is_measured_anew(
    exported: Path, tmp_path: Path, left: str
) -> None:
    output = tmp_path / "results.json"
    _unfinished(exported, output)
    if left == "finished":
        document = json.loads(output.read_text()) | {"unfinished": None}
        output.write_text(json.dumps(document))
    elif left == "cut short":
        output.write_text(output.read_text()[:1000])
    steps: list[str] = []
    run_models(exported, targets=["cpu"], output=output, settings=QUICK, progress=steps.append)
    assert steps[0] == "building for cpu"
    assert len(json.loads(output.read_text())["results"]) == 1


@pytest.mark.parametrize("name", ["time_limit", "memory_limit"])
@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_nothing_is_refused(name: str, limit: int) -> None:
    from mha_export.errors import InputError

    with pytest.raises(InputError, match=name):
        RunSettings(**{name: limit})
