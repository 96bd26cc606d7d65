"""Worker processes: whatever a job does, its outcome comes in time and the next job runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from mha_export.errors import InputError
from mha_export.targets import Job, Limits, Worker, WorkerError, isolated

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import misbehaving_jobs as jobs  # noqa: E402

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")


@pytest.mark.parametrize(
    ("function", "kind", "says"),
    [
        pytest.param(jobs.raise_runtime_error, "error", "MatMul_3", id="raises"),
        pytest.param(jobs.raise_input_error, "error", "damaged", id="raises-own-kind"),
        pytest.param(jobs.raise_memory_error, "out-of-memory", "MemoryError", id="MemoryError"),
        pytest.param(jobs.say_bad_alloc, "out-of-memory", "bad_alloc", id="bad_alloc"),
        pytest.param(jobs.segfault, "crash", "SIGSEGV", id="SIGSEGV", marks=posix_only),
        pytest.param(jobs.kill_itself, "crash", "SIGKILL", id="SIGKILL", marks=posix_only),
        pytest.param(jobs.exit_quietly, "crash", "exit code 7", id="exit"),
        pytest.param(jobs.return_what_does_not_pickle, "error", "pickle", id="unpicklable-result"),
    ],
)
def test_a_bad_end_is_an_outcome(function, kind, says) -> None:
    outcome = isolated(Job(function=function), limits=Limits(seconds=30))
    assert outcome.kind == kind
    assert says in outcome.reason
    with pytest.raises((WorkerError, InputError)):
        outcome.unwrap()


@pytest.mark.parametrize("function", [jobs.spin_forever, jobs.sleep_forever])
def test_an_endless_job_ends_at_its_limit(function) -> None:
    started = time.perf_counter()
    with Worker() as worker:
        assert worker.call(Job(function=jobs.double, args=(1,))).ok
        outcome = worker.call(Job(function=function), limits=Limits(seconds=0.5))
        child = worker.pid
    assert outcome.kind == "timeout"
    assert "0.5 s" in outcome.reason
    assert time.perf_counter() - started < 15
    assert child is None or not psutil.pid_exists(child)


@pytest.mark.parametrize("function", [jobs.allocate_without_end, jobs.allocate_in_a_child])
def test_memory_is_watched_with_that_of_descendants(function) -> None:
    outcome = isolated(Job(function=function), limits=Limits(seconds=60, memory_mb=400))
    assert outcome.kind == "out-of-memory"
    assert "of 400 MiB" in outcome.reason
    assert outcome.peak_rss_mb < 8000


def test_a_segfault_names_its_signal_and_keeps_the_last_output() -> None:
    outcome = isolated(Job(function=jobs.segfault))
    assert outcome.signal == "SIGSEGV"
    assert "about to read address 0" in outcome.output_tail
    assert "segfault" in outcome.output_tail, "the Python stack of the crash"


def test_an_own_error_comes_back_as_its_kind_with_its_fix() -> None:
    outcome = isolated(Job(function=jobs.raise_input_error))
    with pytest.raises(InputError, match="damaged") as caught:
        outcome.unwrap()
    assert caught.value.fix == "write it again"


def test_a_worker_serves_many_jobs_and_survives_the_death_of_one() -> None:
    with Worker() as worker:
        first = worker.call(Job(function=jobs.pid)).unwrap()
        assert worker.call(Job(function=jobs.pid)).unwrap() == first
        assert worker.call(Job(function=jobs.raise_runtime_error)).kind == "error"
        assert worker.call(Job(function=jobs.pid)).unwrap() == first, "an error is not a death"
        assert worker.call(Job(function=jobs.exit_quietly)).kind == "crash"
        assert worker.call(Job(function=jobs.pid)).unwrap() != first
        assert worker.alive
    assert not worker.alive


def test_what_runtimes_print_does_not_disturb_the_replies() -> None:
    a = np.arange(100_000, dtype=np.float32)
    outcome = isolated(Job(function=jobs.print_and_add, args=(a, a)))
    np.testing.assert_array_equal(outcome.unwrap(), 2 * a)
    assert "native print" in outcome.output_tail
    assert "python print" in outcome.output_tail


def test_only_the_tail_of_the_output_is_kept() -> None:
    outcome = isolated(Job(function=jobs.print_much, args=(50_000,)))
    assert outcome.ok
    assert len(outcome.output_tail) <= 8192


def _nested():
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize("function", [lambda: None, _nested()], ids=["lambda", "nested"])
def test_a_function_that_a_worker_cannot_import_is_refused_at_once(function) -> None:
    with pytest.raises(ValueError, match="cannot be imported"):
        isolated(Job(function=function))


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="expected above 0"):
        Limits(seconds=0)


def test_a_script_without_a_main_guard_can_use_workers(tmp_path) -> None:
    """Multiprocessing would run the script again in every child."""
    import subprocess

    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {HERE!r})\n"
        "import misbehaving_jobs as jobs\nfrom mha_export.targets import Job, isolated\n"
        "print(isolated(Job(function=jobs.double, args=(21,))).unwrap())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["42"], done.stderr
