"""What runs in a worker process of ``bench_speed``: one candidate, loaded once, timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _speed_models import Decoder, session_decoder, token_arrays, torch_decoder, torch_model
from _speed_work import Plan

from mha_export.forms._weights import random_weights

Step = Callable[[], Any]


@dataclass(frozen=True)
class Loaded:
    """A candidate that is ready: times of (repeats, warmup) runs, and the output of one."""

    times: Callable[[int, int], Sequence[float]]
    output: Callable[[], np.ndarray]


@dataclass(frozen=True)
class LoadTime:
    """How long a candidate took to be ready."""

    load_ms: float


_loaded: dict[tuple[str, str], Loaded] = {}


def load_plan(plan: Plan) -> LoadTime:
    """Load anew, whatever is loaded."""
    _loaded.clear()
    started = time.perf_counter()
    _ready(plan)
    return LoadTime(load_ms=(time.perf_counter() - started) * 1e3)


def time_plan(plan: Plan, repeats: int, warmup: int) -> list[float]:
    """Milliseconds of each run."""
    return list(_ready(plan).times(repeats, warmup))


def output_of(plan: Plan) -> np.ndarray:
    """What one run gives: [batch, length, width], or [1, 1, width] of a decode step."""
    return _ready(plan).output()


def _stepped(step: Step, output: Callable[[], np.ndarray]) -> Loaded:
    """A candidate that runs by a call without arguments; ``output`` reads what it left."""

    def times(repeats: int, warmup: int) -> list[float]:
        for _ in range(warmup):
            step()
        found = []
        for _ in range(repeats):
            started = time.perf_counter()
            step()
            found.append((time.perf_counter() - started) * 1e3)
        return found

    def one() -> np.ndarray:
        step()
        return output()

    return Loaded(times=times, output=one)


def _steps(decoder: Decoder) -> Loaded:
    """The steps of a decoder are what is timed; the prompt before them is read anew each time."""

    def times(repeats: int, warmup: int) -> list[float]:
        found = []
        for _ in range(warmup + repeats):
            decoder.read()
            started = time.perf_counter()
            decoder.steps()
            found.append((time.perf_counter() - started) * 1e3)
        return found[warmup:]

    def output() -> np.ndarray:
        decoder.read()
        return decoder.steps()

    return Loaded(times=times, output=output)


def _ready(plan: Plan) -> Loaded:
    key = (plan.work.name, plan.candidate.name)
    if key not in _loaded:
        _loaded.clear()
        runtime = plan.candidate.runtime.partition(":")[0]
        load = {"cpu": _on_ort, "openvino": _on_openvino, "torch": _on_torch, "read": _reads}[
            runtime
        ]
        _loaded[key] = load(plan)
    return _loaded[key]


def arrays_of(plan: Plan) -> dict[str, np.ndarray]:
    """The same numbers for every candidate of a piece of work."""
    work, rng = plan.work, np.random.default_rng(plan.seed + 1)
    if work.kind == "model":
        return token_arrays(work, plan.file, plan.seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    if work.kind != "decode":
        return {"hidden_states": draw(work.batch, work.length, work.width)}
    narrow = work.kv_heads * work.head_dim
    arrays = {
        "query": draw(1, 1, work.width),
        "key": draw(1, 1, narrow),
        "value": draw(1, 1, narrow),
    }
    for name in ("past_key", "past_value"):
        buffer = draw(1, work.kv_heads, work.length, work.head_dim)
        # In place the last row is the new token's; by concatenation it is not there yet.
        arrays[name] = buffer if plan.candidate.in_place else buffer[:, :, :-1].copy()
    if plan.candidate.in_place:
        arrays["kv_lengths"] = np.array([work.length], np.int64)
    return arrays


def _on_ort(plan: Plan) -> Loaded:
    """Inputs and outputs bound once; a cache in place is bound as both."""
    import onnxruntime as ort

    from mha_export.targets._ort import SessionSetup, open_session, session_options

    assert plan.file is not None
    if plan.work.kind == "generate":
        options = session_options(ort, SessionSetup(threads=plan.threads))
        return _steps(session_decoder(plan.work, plan.file, options, plan.seed))
    session = open_session(str(plan.file), SessionSetup(threads=plan.threads))
    wanted = {value.name for value in session.get_inputs()}
    values = {
        name: ort.OrtValue.ortvalue_from_numpy(array)
        for name, array in arrays_of(plan).items()
        if name in wanted
    }
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    first, *others = session.get_outputs()
    binding.bind_output(first.name)
    for value in others:
        if plan.candidate.in_place:
            binding.bind_ortvalue_output(value.name, values[value.name.replace("present", "past")])
        else:
            binding.bind_output(value.name)
    return _stepped(
        lambda: session.run_with_iobinding(binding),
        lambda: np.asarray(binding.get_outputs()[0].numpy()),
    )


def _on_openvino(plan: Plan) -> Loaded:
    import tempfile

    from mha_export.targets import CannotRun, CompileOptions, Program, target_named

    assert plan.file is not None
    precision = plan.candidate.runtime.partition(":")[2] or "f32"
    folder = Path(tempfile.mkdtemp(prefix="built-", dir=plan.file.parent))
    options = CompileOptions(precision=precision, threads=plan.threads, workdir=folder)
    artifact = target_named("openvino").compile(Program(graphs={"main": plan.file}), options)
    session = artifact.load()
    assert not isinstance(session, CannotRun)
    arrays = arrays_of(plan)
    return Loaded(
        times=lambda repeats, warmup: session.time(arrays, repeats=repeats, warmup=warmup),
        output=lambda: next(iter(session.run(arrays).values())),
    )


def _reads(plan: Plan) -> Loaded:
    """Every key and value of the cache, once."""
    import torch

    torch.set_num_threads(plan.threads)
    cache = [torch.from_numpy(arrays_of(plan)[f"past_{name}"]) for name in ("key", "value")]
    sums: list[float] = []

    def step() -> None:
        sums[:] = [float(array.sum()) for array in cache]

    return _stepped(step, lambda: np.array(sums, np.float32))


def _on_torch(plan: Plan) -> Loaded:
    import torch

    torch.set_num_threads(plan.threads)
    if plan.work.kind == "generate":
        return _steps(torch_decoder(plan.work, plan.seed))
    arrays = {name: torch.from_numpy(array) for name, array in arrays_of(plan).items()}
    if plan.work.kind == "model":
        run = torch_model(plan.work, arrays)
    elif plan.work.kind == "decode":
        run = _torch_decode(plan, arrays)
    else:
        run = _torch_layer(plan, arrays)
    if plan.candidate.runtime == "torch:compile":
        run = torch.compile(run)
    held: list[Any] = []

    def step() -> None:
        with torch.inference_mode():
            held[:] = [run()]

    return _stepped(step, lambda: held[0].numpy())


def _torch_layer(plan: Plan, arrays: dict[str, Any]) -> Step:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    work = plan.work
    weights = {
        name: torch.from_numpy(array)
        for name, array in random_weights(work.spec(), plan.seed).items()
    }
    x, d = arrays["hidden_states"], work.head_dim
    mask = None
    if work.window:
        at = torch.arange(work.length)
        distance = at[:, None] - at[None]
        mask = (distance >= 0) & (distance < work.window)

    def heads(name: str, count: int) -> Any:
        return (x @ weights[name]).view(work.batch, work.length, count, d).transpose(1, 2)

    def run() -> Any:
        context = scaled_dot_product_attention(
            heads("w_q", work.q_heads),
            heads("w_k", work.kv_heads),
            heads("w_v", work.kv_heads),
            attn_mask=mask,
            is_causal=mask is None and work.kind == "prefill",
            enable_gqa=work.q_heads != work.kv_heads,
        )
        merged = context.transpose(1, 2).reshape(work.batch, work.length, work.width)
        return merged @ weights["w_o"]

    return run


def _torch_decode(plan: Plan, arrays: dict[str, Any]) -> Step:
    """One token against a cache that already has a row for it: nothing is copied."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    work, d = plan.work, plan.work.head_dim
    room = torch.zeros(1, work.kv_heads, 1, d)
    caches = [torch.cat([arrays[f"past_{name}"], room], 2) for name in ("key", "value")]
    news = [arrays[name].view(1, work.kv_heads, 1, d) for name in ("key", "value")]
    query = arrays["query"].view(1, work.q_heads, 1, d)

    def run() -> Any:
        for cache, new in zip(caches, news, strict=True):
            cache[:, :, -1:] = new
        key, value = caches
        context = scaled_dot_product_attention(
            query, key, value, enable_gqa=work.q_heads != work.kv_heads
        )
        return context.transpose(1, 2).reshape(1, 1, work.width)

    return run
