"""A report of the size people get: three machines, two models, every status, one regression."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest

from mha_export.report import Report, changes_between, merge
from mha_export.report._merge import with_changes
from mha_export.report.records import (
    CapabilityRecord,
    CaseRecord,
    Damaged,
    DifferenceRecord,
    DoctorRecord,
    ExportRecord,
    LatencyRecord,
    Loaded,
    MachineRecord,
    ModelRecord,
    ParityRecord,
    PlacementRecord,
    ProofCaseRecord,
    ProofRecord,
    RatioRecord,
    ReasonRecord,
    ResultRecord,
    ResultsRecord,
    SiteOutcomeRecord,
    SiteRecord,
    StateRecord,
    TargetRecord,
    VariantRecord,
)
from mha_export.spec import AttentionSpec, CausalAlignment, EmptyRow, MaskSpec, RotarySpec

CASES = ("ordinary", "left padded", "right padded", "holes", "one token", "extreme", "past 7")


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _noise(*words: object) -> float:
    """A repeatable number in [0, 1)."""
    return int(_sha(" ".join(map(str, words)))[:8], 16) / 2**32


XEON = MachineRecord(
    id="xeon-2c",
    os="Debian 12 (Linux 6.1, x86-64)",
    cpu="Intel Xeon Platinum 8481C, 2 cores, AVX-512, AMX",
    memory_gb=16.0,
    load=0.21,
    cores=2,
    python="3.11.7",
    packages={"onnx": "1.23.2", "onnxruntime": "1.32.0", "openvino": "2026.4.0"},
    ceilings={"gemm_gflops": 220.0, "copy_gbytes_s": 18.7},
)
RTX = MachineRecord(
    id="rtx-4080",
    os="Windows 11 24H2",
    cpu="AMD Ryzen 9 7950X",
    memory_gb=64.0,
    accelerators=("NVIDIA GeForce RTX 4080 16 GB",),
    cores=32,
    python="3.12.4",
    packages={"onnxruntime-directml": "1.30.0", "tensorrt-rtx": "1.7.1"},
)
AIR = MachineRecord(
    id="m3-air",
    os="macOS 16.2",
    cpu="Apple M3",
    memory_gb=24.0,
    accelerators=("Apple M3 GPU",),
    load=1.4,
    cores=8,
    python="3.13.0",
    packages={"onnxruntime": "1.32.0", "onnxruntime-ep-webgpu": "0.4.0"},
)
BERT = AttentionSpec(
    q_heads=12,
    kv_heads=12,
    head_dim=32,
    mask=MaskSpec(padding=True, fill="min", empty_row=EmptyRow.UNIFORM),
)
LLAMA = AttentionSpec(
    q_heads=8,
    kv_heads=2,
    head_dim=32,
    mask=MaskSpec(
        causal=CausalAlignment.BOTTOM_RIGHT,
        left_window=63,
        padding=True,
        fill="min",
        empty_row=EmptyRow.UNIFORM,
    ),
    rotary=RotarySpec(dim=32),
)


def _proof(target: str, site: str, first: str) -> ProofRecord:
    cases = tuple(
        ProofCaseRecord(
            name=name,
            status="pass",
            max_err=bound * (0.05 + 0.75 * _noise(target, site, name)),
            bound=bound,
        )
        for name, bound in zip(CASES, (6e-7, 5e-7, 5e-7, 7e-7, 4e-7, 3e-3, 6e-7), strict=True)
    )
    worst = max(cases, key=lambda case: case.max_err / case.bound)
    return ProofRecord(
        engine="cpu (onnxruntime 1.32.0)",
        against=("oracle", "original"),
        cases=len(cases),
        max_err=worst.max_err,
        bound=worst.bound,
        representative=None if site == first else first,
        weights="full" if site == first else "structural",
        by_case=cases if site == first else (),
    )


def _export(name: str, spec: AttentionSpec, layers: int, forms: dict[str, str]) -> ExportRecord:
    sites = [
        SiteRecord(
            id=f"layer.{i}.self",
            verdict="attention",
            replaceable=True,
            spec=spec.to_json(),
            nodes=tuple(
                f"/encoder/layer.{i}/attention/self/{op}"
                for op in (
                    "Transpose",
                    "Transpose_1",
                    "MatMul",
                    "Div",
                    "Add",
                    "Softmax",
                    "MatMul_1",
                )
            ),
        )
        for i in range(layers)
    ]
    if name.startswith("llama"):
        sites += [
            SiteRecord(
                id="softmax.4",
                verdict="rejected",
                nodes=("/moe/Softmax_2",),
                reason=ReasonRecord(
                    code="probabilities-used-elsewhere",
                    message="the probabilities are read by TopK, so this is a router or an "
                    "attention whose weights leave the site",
                    value="/moe/Softmax_2_output_0",
                    nodes=("/moe/Softmax_2", "/moe/TopK"),
                ),
            ),
            SiteRecord(
                id="softmax.5",
                verdict="not_attention",
                nodes=("/lm_head/Softmax",),
                reason=ReasonRecord(code="classifier", message="a classifier over the vocabulary"),
            ),
        ]
    variants = []
    for target, form in forms.items():
        outcomes = {
            f"layer.{i}.self": SiteOutcomeRecord(
                form=form,
                params={"opset": 23},
                status="fused" if form != "primitive" else "lowered",
                proof=_proof(target, f"layer.{i}.self", "layer.0.self"),
            )
            for i in range(layers)
        }
        if target == "directml" and name.startswith("llama"):
            outcomes["layer.1.self"] = SiteOutcomeRecord(
                form=None,
                status="kept",
                reason="no form states left_window here: ort-gqa needs a mask without padding",
            )
        variants.append(
            VariantRecord(
                target=target,
                file=f"{target}.onnx",
                dtype="fp32",
                opset=23,
                sites=outcomes,
                sha256=_sha(f"{name} {target}"),
                nodes=140,
            )
        )
    return ExportRecord(
        model=ModelRecord(
            name=name, sha256=_sha(name), opsets={"": 18}, producer="pytorch 2.13", nodes=412
        ),
        sites=tuple(sites),
        variants=tuple(variants),
    )


EXPORTS = (
    _export(
        "all-MiniLM-L6-v2",
        BERT,
        6,
        {
            "cpu": "onnx",
            "openvino": "onnx",
            "directml": "ort-mha",
            "tensorrt-rtx": "trt",
            "portable": "portable",
        },
    ),
    _export("llama-tiny", LLAMA, 4, {"cpu": "ort-gqa", "openvino": "tiled", "directml": "ort-gqa"}),
)


def _latency(p50: float, n: int = 200) -> LatencyRecord:
    return LatencyRecord(
        p10=p50 * 0.97,
        p50=p50,
        p90=p50 * 1.06,
        p99=p50 * 1.22,
        n=n,
        warmup=20,
        timer="perf_counter, device synchronised",
        threads=2,
        rounds=20,
        low=p50 * 0.992,
        high=p50 * 1.009,
    )


def _parity(seed: str, scale: float, failing: str | None = None) -> ParityRecord:
    cases = []
    for name in CASES:
        factor = scale * (0.1 + 0.6 * _noise(seed, name))
        status = "pass" if factor <= 1 else "imprecise"
        bound = 4e-4 if name == "extreme" else 2.1e-6
        if name == failing:
            factor, status = 4310.0, "fail"
        cases.append(
            CaseRecord(
                name=name,
                status=status,
                max_abs=factor * bound,
                max_rel=factor * bound * 4,
                rmse=factor * bound / 7,
                bound=bound,
                factor=factor,
                err_over_ensemble=factor * 2.2,
                cosine=1 - 1e-9 * factor,
                argmax_agreement=1.0 if status != "fail" else 0.82,
                output="last_hidden_state",
                inputs_file=f"failures/{seed}-{name}.npz".replace(" ", "-")
                if status == "fail"
                else None,
                replay=f"mha-export run out/{seed}.onnx --inputs failures/{seed}-holes.npz"
                if status == "fail"
                else None,
            )
        )
    worst = max(cases, key=lambda case: case.factor or 0)
    return ParityRecord(
        against="original in float64 (reference)",
        max_abs=worst.max_abs,
        max_rel=worst.max_rel,
        rmse=worst.rmse,
        factor=worst.factor,
        err_over_ensemble=worst.err_over_ensemble,
        cosine=worst.cosine,
        argmax_agreement=worst.argmax_agreement,
        by_case=tuple(cases),
        ensemble=("original on reference", "original on cpu, unoptimised", "original on cpu"),
        first_difference=DifferenceRecord(
            site="layer.2.self",
            stage="mask",
            message="the scores agree, the masked scores do not: keys 3 and 5 take part",
            max_abs=1.4,
            bound=3e-6,
            case=failing,
        )
        if failing
        else None,
    )


def _result(
    model: str, target: str, form: str, p50: float, seq: int, **changes: object
) -> ResultRecord:
    name, _, precision = target.partition(":")
    layers = 6 if model.startswith("all") else 4
    raw = {32: 4.1, 128: 13.2, 512: 71.0}[seq] * (0.4 if layers == 4 else 1.0)
    base = ResultRecord(
        model=model,
        model_sha256=_sha(model),
        target=name,
        variant=name,
        variant_sha256=_sha(f"{model} {name}"),
        precision=precision or None,
        status="pass",
        forms={form: layers},
        workload={"batch": 1, "sequence_length": seq},
        runtime={"openvino": "openvino"}.get(name, "onnxruntime"),
        runtime_version={"openvino": "2026.4.0"}.get(name, "1.32.0"),
        device={"directml": "NVIDIA GeForce RTX 4080"}.get(name, "CPU"),
        placement=PlacementRecord(float_compute_nodes=86, on_target=86, evidence="profile"),
        parity=_parity(f"{model}-{target}", 0.8),
        latency_ms=_latency(p50),
        vs=RatioRecord(
            baseline="raw on cpu", ratio=p50 / raw, low=p50 / raw * 0.99, high=p50 / raw * 1.01
        ),
        load_ms=41.0,
        compile_ms=310.0,
        first_run_ms=p50 * 2.4,
        peak_rss_mb=412.0,
        gflops=min(190.0, 2300 / p50),
        gbytes_s=3.1,
        roofline_fraction=min(0.86, 10 / p50),
        replay=f"mha-export run out -t {target} --dim batch=1 --dim sequence_length={seq}",
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def _results() -> dict[str, list[ResultRecord]]:
    mini, llama = "all-MiniLM-L6-v2", "llama-tiny"
    here = []
    for seq, cpu, ov, bf16, raw in (
        (32, 3.9, 3.4, 1.9, 4.1),
        (128, 11.8, 10.9, 4.7, 13.2),
        (512, 58.2, 52.0, 21.4, 71.0),
    ):
        here += [
            _result(mini, "cpu", "onnx", cpu, seq),
            _result(mini, "cpu", "onnx", raw, seq, forms={}, variant="original", vs=None),
            _result(mini, "openvino:f32", "onnx", ov, seq),
            _result(
                mini,
                "openvino:bf16",
                "onnx",
                bf16,
                seq,
                status="imprecise",
                reason="right, but 9.4 times coarser than its bound: computed in bf16",
                parity=_parity("bf16", 14.0),
            ),
            _result(llama, "cpu", "ort-gqa", cpu * 0.31, seq, graph="prefill"),
        ]
    here += [
        _result(
            llama,
            "openvino:f32",
            "tiled",
            4.2,
            128,
            graph="prefill",
            status="fail",
            reason="error 4310 times the bound on 'holes'",
            parity=_parity("llama-tiny-openvino", 0.9, failing="holes"),
        ),
        _result(mini, "reference", "onnx", 214.0, 32, vs=None, roofline_fraction=None),
        _result(
            mini,
            "cuda",
            "onnx",
            1.0,
            32,
            status="unavailable",
            reason="no CUDA device was found",
            parity=None,
            latency_ms=None,
            placement=None,
            vs=None,
            load_ms=None,
            compile_ms=None,
            first_run_ms=None,
            peak_rss_mb=None,
            gflops=None,
            gbytes_s=None,
            roofline_fraction=None,
        ),
    ]
    windows = [
        _result(mini, "directml", "ort-mha", 1.21, 128, device="NVIDIA GeForce RTX 4080"),
        _result(
            mini,
            "tensorrt-rtx",
            "trt",
            1.0,
            128,
            status="built",
            reason="ahead-of-time engine for SM 89, built without a device",
            parity=None,
            latency_ms=None,
            placement=None,
            vs=None,
            gflops=None,
            roofline_fraction=None,
        ),
        _result(
            llama,
            "directml",
            "ort-gqa",
            2.2,
            128,
            graph="decode",
            status="fallback",
            reason="4 of 61 nodes ran on the CPU provider",
            placement=PlacementRecord(
                float_compute_nodes=61,
                on_target=57,
                elsewhere=tuple(
                    f"/layers.{i}/attn/Attention (Attention) -> CPUExecutionProvider"
                    for i in range(4)
                ),
                evidence="profile",
            ),
        ),
    ]
    mac = [
        _result(mini, "cpu", "onnx", 7.4, 128, gflops=310.0),
        _result(
            mini,
            "webgpu",
            "ort-mha",
            5.6,
            128,
            status="error",
            reason="the worker died with signal 11 (SIGSEGV) while compiling",
            parity=None,
            latency_ms=None,
            vs=None,
        ),
    ]
    return {XEON.id: here, RTX.id: windows, AIR.id: mac}


FEATURES = (
    "plain",
    "causal",
    "causal, past",
    "gqa",
    "key padding",
    "bool mask",
    "float bias",
    "window",
    "softcap",
    "head_dim 128",
)


def _doctor(machine: MachineRecord, targets: dict[str, str]) -> DoctorRecord:
    states = ("ok", "ok", "ok", "ok", "ok", "imprecise", "unsupported-at-load", "wrong", "fallback")
    records = []
    for target, missing in targets.items():
        capabilities = (
            ()
            if missing
            else tuple(
                CapabilityRecord(
                    form=form,
                    feature=feature,
                    dtype=dtype,
                    state="ok"
                    if form == "primitive"
                    else states[int(len(states) * _noise(target, form, feature, dtype))],
                    max_err=2e-7 if dtype == "fp32" else 8e-4,
                    placement=target,
                )
                for form in ("primitive", "onnx", "ort-mha", "ort-gqa")
                for feature in FEATURES
                for dtype in ("fp32", "fp16")
            )
        )
        state = (
            StateRecord(
                status="unavailable", reason=missing, fix=f"pip install 'mha-export[{target}]'"
            )
            if missing
            else StateRecord(status="available")
        )
        records.append(
            TargetRecord(
                target=target,
                build=state,
                run=state,
                runtime="onnxruntime",
                version=None if missing else "1.32.0",
                device="CPU",
                capabilities=capabilities,
            )
        )
    return DoctorRecord(machine=machine, targets=tuple(records))


def sample_loaded() -> Loaded:
    """Results of three machines, and one damaged file."""
    results = _results()
    return Loaded(
        results=(
            (
                Path("xeon.json"),
                ResultsRecord(
                    machine=XEON,
                    results=tuple(results[XEON.id]),
                    exports=EXPORTS,
                    doctor=_doctor(
                        XEON,
                        {
                            "cpu": "",
                            "openvino": "",
                            "reference": "",
                            "cuda": "onnxruntime-gpu is not installed",
                        },
                    ),
                ),
            ),
            (
                Path("rtx.json"),
                ResultsRecord(
                    machine=RTX,
                    results=tuple(results[RTX.id]),
                    doctor=_doctor(RTX, {"directml": ""}),
                ),
            ),
            (Path("air.json"), ResultsRecord(machine=AIR, results=tuple(results[AIR.id]))),
        ),
        damaged=(
            Damaged(path=Path("old.json"), reason="old.json: not JSON (cut short at line 1)"),
        ),
    )


def earlier(loaded: Loaded) -> Loaded:
    """The same a release ago: 20% faster cpu, directml without fallback."""
    runs = []
    for path, run in loaded.results:
        results = []
        for result in run.results:
            if result.target == "cpu" and result.latency_ms is not None:
                result = dataclasses.replace(
                    result, latency_ms=_latency(result.latency_ms.p50 * 0.8)
                )
            if result.status == "fallback":
                result = dataclasses.replace(
                    result,
                    status="pass",
                    reason=None,
                    placement=PlacementRecord(float_compute_nodes=61, on_target=61),
                )
            results.append(result)
        runs.append((path, dataclasses.replace(run, results=tuple(results))))
    return Loaded(results=tuple(runs))


@pytest.fixture(scope="session")
def sample() -> Report:
    return merge(sample_loaded())


@pytest.fixture(scope="session")
def changed(sample: Report) -> Report:
    """The sample, compared with the release before."""
    return with_changes(sample, changes_between(sample, merge(earlier(sample_loaded()))))
