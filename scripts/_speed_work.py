"""The pieces of work that ``bench_speed`` times, and who may do each of them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from _speed_models import is_decoder, model_file

from mha_export.forms import FormParams, build_model, form_named
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    EmptyRow,
    MaskSpec,
    ProjectionSpec,
)

LEAST_ROWS = 16
"""Queries that a tile should have."""

WHOLE = ("model", "generate")
"""Kinds of work that a whole model does."""

RAW = "raw"
"""The baseline: decomposed, key/value heads repeated, as exporters write it."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One piece of work.

    Attributes:
        kind: ``encoder`` and ``prefill``, one layer with its projections (causal in the second),
            ``decode``, one token without them, ``model``, all of a Hugging Face folder once, or
            ``generate``, its single-token steps after a prompt, with a cache.
        length: tokens of the prompt; or keys a decode step sees, the new one included.
        new: steps of ``generate``; what is timed is all of them, without the prompt.
        window: tokens a query sees, itself included; 0 for all.
        model: the folder.
    """

    kind: str
    length: int
    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    window: int = 0
    batch: int = 1
    model: str = ""
    new: int = 0

    @property
    def name(self) -> str:
        if self.kind == "generate":
            return f"{Path(self.model).name}, {self.new} tokens after {self.length}"
        if self.kind == "model":
            return f"{Path(self.model).name}, {self.length} tokens"
        window = f" window {self.window}" if self.window else ""
        heads = f"{self.q_heads}/{self.kv_heads}x{self.head_dim}"
        batch = f" batch {self.batch}" if self.kind == "encoder" else ""
        return f"{self.kind} {self.length}{window}{batch}, {heads}"

    @property
    def width(self) -> int:
        return self.q_heads * self.head_dim

    def spec(self, *, cache: str = "concat", dynamic: bool = False) -> AttentionSpec:
        """What the work states; ``cache`` matters to ``decode`` alone."""
        mask: dict[str, Any] = {"left_window": self.window - 1} if self.window else {}
        heads = {"q_heads": self.q_heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        if self.kind != "decode":
            length = "s" if dynamic else self.length
            if self.kind == "prefill":
                mask["causal"] = CausalAlignment.TOP_LEFT
            return AttentionSpec(
                **heads,
                batch=self.batch,
                q_len=length,
                kv_len=length,
                mask=MaskSpec(**mask),
                projections=ProjectionSpec(d_model=self.width),
            )
        static = cache != "concat"
        if static:
            mask["empty_row"] = EmptyRow.ZERO
        return AttentionSpec(
            **heads,
            batch=1,
            q_len=1,
            mask=MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT, **mask),
            cache=CacheSpec(growth=cache, max_length=self.length if static else None),
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Who does a piece of work, and how.

    Attributes:
        runtime: a target, ``openvino:bf16`` for one in another precision, ``torch``, or ``read``,
            which only reads the cache.
        family: ``raw``, ``peer`` (the raw graph as another tool rewrites it), ``fused`` (one op of
            a vendor), ``ours``, ``torch``, or ``floor``, whose output is not attention.
        peer: which tool rewrites the raw graph.
        weights: of the linear layers of a whole model; see ``export --weights``.
        cache: how decode grows its cache. in_place: past and present are one buffer.
    """

    name: str
    runtime: str
    family: str
    form: str = ""
    opset: int = 17
    options: dict[str, Any] = field(default_factory=dict)
    cache: str = "concat"
    dynamic: bool = False
    peer: str = ""
    weights: str = "keep"

    @property
    def in_place(self) -> bool:
        return self.cache != "concat"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A candidate with its graph on disk; travels to the worker that times it."""

    work: Work
    candidate: Candidate
    file: Path | None
    threads: int
    seed: int


def candidates(work: Work, *, tiles: list[int], bf16: bool) -> list[Candidate]:
    """Everyone who may try; a form that refuses the work is left out by :func:`plan`."""
    if work.kind == "decode":
        return _decoders()
    if work.kind == "model":
        return _models()
    if work.kind == "generate":
        return _generators()
    found = [
        Candidate(name=RAW, runtime="cpu", family="raw", form="primitive"),
        *_peers(),
        *([_packed_encoder()] if work.kind == "encoder" else []),
        Candidate(name="onnx", runtime="cpu", family="fused", form="onnx", opset=23),
        *([_windowed("onnx, opset 25")] if work.window else []),
        Candidate(name="ort-mha", runtime="cpu", family="fused", form="ort-mha"),
        Candidate(name="ort-gqa", runtime="cpu", family="fused", form="ort-gqa"),
        *_tiled(work, "cpu", tiles),
        Candidate(name="torch SDPA", runtime="torch", family="torch"),
        Candidate(name="torch SDPA, compiled", runtime="torch:compile", family="torch"),
    ]
    for runtime in ("openvino", *(["openvino:bf16"] if bf16 else [])):
        found.append(
            # Opset 23: OpenVINO 2026.4 reads opset 25 and ignores the windows.
            Candidate(
                name=f"{runtime} onnx", runtime=runtime, family="fused", form="onnx", opset=23
            )
        )
        found += _tiled(work, runtime, tiles)
    return [*found, _products()] if work.kind == "prefill" else found


def _models() -> list[Candidate]:
    """As exported on each runtime, after the peers, and as we rewrite it where nobody says how."""
    return [
        Candidate(name=RAW, runtime="cpu", family="raw"),
        *(replace(peer, form="") for peer in _peers()),
        Candidate(name="ours, default", runtime="cpu", family="ours"),
        *_quantised(),
        Candidate(name="torch", runtime="torch", family="torch"),
        Candidate(name="torch, compiled", runtime="torch:compile", family="torch"),
        Candidate(name="openvino, as exported", runtime="openvino", family="fused"),
        Candidate(name="openvino, ours", runtime="openvino", family="ours"),
    ]


def _quantised(cache: str = "keep") -> list[Candidate]:
    """Ours with weights as the runtime's quantiser makes them: another model, another family."""
    return [
        Candidate(
            name=f"ours, {kind}", runtime="cpu", family="quantised", weights=kind, cache=cache
        )
        for kind in ("int8", "int4")
    ]


def _generators() -> list[Candidate]:
    """A decoder with a cache, stepped by ``DecodeSession``; torch by its own growing cache."""
    return [
        Candidate(name=RAW, runtime="cpu", family="raw"),
        Candidate(name="ort-gqa, concat", runtime="cpu", family="fused", form="ort-gqa"),
        Candidate(
            name="ort-gqa, one buffer",
            runtime="cpu",
            family="fused",
            form="ort-gqa",
            cache="static",
        ),
        Candidate(name="ours, concat", runtime="cpu", family="ours"),
        Candidate(name="ours, in place", runtime="cpu", family="ours", cache="static"),
        *_quantised("static"),
        Candidate(name="torch", runtime="torch", family="torch"),
    ]


def _tiled(work: Work, runtime: str, tiles: list[int]) -> list[Candidate]:
    """Tiles of plain products, and tiles of an op each, which pay with shorter ones too."""
    prefix = "" if runtime == "cpu" else f"{runtime} "

    def one(name: str, n: int, opset: int, dynamic: bool = False, **options: Any) -> Candidate:
        return Candidate(
            name=f"{prefix}tiled {n}{name}",
            runtime=runtime,
            family="ours",
            form="tiled",
            opset=opset,
            options={"tiles": n, **options},
            dynamic=dynamic,
        )

    fitting = [n for n in tiles if n * LEAST_ROWS <= work.length] or [1]
    most = fitting[-1]
    finest = 2 * most if 2 * most * LEAST_ROWS <= work.length else most
    found = [one("", n, 17) for n in fitting]
    found += [one(", an op a tile", n, 23, product="attention") for n in {*fitting, finest}]
    if work.kind == "prefill":
        found += [one(", whole-tile mask", n, 17, mask="tile") for n in {*fitting, finest}]
    if runtime == "cpu" and work.kind == "prefill":
        found.append(one(", dynamic", most, 17, dynamic=True))
        found.append(one(", an op a tile, dynamic", most, 23, dynamic=True, product="attention"))
    return found


def _products() -> Candidate:
    """The projections and the tiles' two products without mask and softmax: what plain ops need."""
    return Candidate(
        name="products alone, plain ops",
        runtime="cpu",
        family="floor",
        form="tiled",
        options={"tiles": 16, "mask": "tile"},
    )


def _peers() -> list[Candidate]:
    """The raw graph as the tools that exporters come with would have it."""
    return [
        Candidate(name=f"raw, {peer}", runtime="cpu", family="peer", form="primitive", peer=peer)
        for peer in ("ort-optimizer", "onnxscript")
    ]


def _packed_encoder() -> Candidate:
    return Candidate(name="ort-attention", runtime="cpu", family="fused", form="ort-attention")


def _windowed(name: str) -> Candidate:
    """The op with a window of its own, instead of a mask."""
    return Candidate(name=name, runtime="cpu", family="fused", form="onnx", opset=25)


def _decoders() -> list[Candidate]:
    def ours(name: str, **fields: Any) -> Candidate:
        return Candidate(name=name, runtime="cpu", family="ours", form="grouped", **fields)

    return [
        Candidate(name=RAW, runtime="cpu", family="raw", form="primitive"),
        *_peers(),
        Candidate(name="onnx, concat", runtime="cpu", family="fused", form="onnx", opset=23),
        Candidate(name="ort-gqa, concat", runtime="cpu", family="fused", form="ort-gqa"),
        Candidate(
            name="ort-gqa, shared buffer",
            runtime="cpu",
            family="fused",
            form="ort-gqa",
            cache="shared_buffer",
        ),
        ours("grouped, concat"),
        ours("grouped, in place (TensorScatter)", opset=24, cache="static"),
        ours("grouped, in place (ScatterElements)", opset=18, cache="static"),
        Candidate(
            name="openvino onnx, concat",
            runtime="openvino",
            family="fused",
            form="onnx",
            opset=23,
        ),
        Candidate(
            name="openvino grouped, concat", runtime="openvino", family="ours", form="grouped"
        ),
        Candidate(name="torch SDPA", runtime="torch", family="torch"),
        Candidate(name="keys and values read", runtime="read", family="floor"),
    ]


def plan(work: Work, candidate: Candidate, folder: Path, *, threads: int, seed: int) -> Plan | str:
    """The candidate's graph on disk, or why its form cannot state the work."""
    file = None
    if work.kind in WHOLE and candidate.family != "torch":
        made = model_file(work, candidate)
        if isinstance(made, str):
            return made
        file = made
        if candidate.peer:
            file = made.with_name(f"{candidate.peer}.onnx")
            shutil.copy(made, file)
            _rewrite(file, candidate.peer, work)
    elif candidate.form:
        form, params = (
            form_named(candidate.form),
            FormParams(opset=candidate.opset, options=candidate.options),
        )
        spec = work.spec(cache=candidate.cache, dynamic=candidate.dynamic)
        verdict = form.supports(spec, params)
        if not verdict:
            return str(verdict)
        name = "".join(c if c.isalnum() else "_" for c in candidate.name)
        file = folder / f"{name}.onnx"
        model = build_model(form, spec, params, seed=seed)
        if candidate.family == "floor":
            _keep_products(model)
        ir.save(model, file)
        if candidate.peer:
            _rewrite(file, candidate.peer, work)
    return Plan(work=work, candidate=candidate, file=file, threads=threads, seed=seed)


def _keep_products(model: ir.Model) -> None:
    """Every mask and softmax taken out: a node gives on what it was given."""
    for node in list(model.graph):
        mask = node.op_type == "Add" and any("tile_mask" in str(v.name) for v in node.inputs if v)
        if mask or node.op_type == "Softmax":
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
            model.graph.remove(node, safe=True)


def _rewrite(file: Path, peer: str, work: Work) -> None:
    """The graph in ``file`` as ``peer`` rewrites it, told all that it asks to be told."""
    import onnx

    if peer == "ort-optimizer":
        from onnxruntime.transformers.optimizer import optimize_model

        encodes = not is_decoder(Path(work.model)) if work.model else work.kind == "encoder"
        kind = "bert" if encodes else "gpt2"
        # 0, of a whole model: the tool finds them itself.
        fused = optimize_model(str(file), kind, num_heads=work.q_heads, hidden_size=work.width)
        fused.save_model_to_file(str(file))
        return
    from onnxscript import optimizer
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model = ir.from_proto(optimizer.optimize(onnx.load(file)))
    ir.save(optimize_for_ort(model)[0], file)


def works(
    prefill: list[int],
    decode: list[int],
    *,
    window: tuple[int, int] | None,
    heads: dict[str, tuple[int, int, int]],
    encoder: list[int],
    batches: list[int],
    models: list[tuple[str, int]],
    generate: list[tuple[str, int, int]],
) -> list[Work]:
    """One piece of work a length; ``window``: its width and the length of its prompt.

    ``models``: folders, each with a number of tokens; ``generate``: with a prompt's and with steps.
    """
    fields = {
        kind: dict(zip(("q_heads", "kv_heads", "head_dim"), sizes, strict=True))
        for kind, sizes in heads.items()
    }
    found = [
        Work(kind="encoder", length=n, batch=batch, **fields["encoder"])
        for n in encoder
        for batch in batches
    ]
    found += [Work(kind="prefill", length=n, **fields["prefill"]) for n in prefill]
    if window:
        width, length = window
        found.append(Work(kind="prefill", length=length, window=width, **fields["prefill"]))
    found += [Work(kind="decode", length=n, **fields["decode"]) for n in decode]
    found += [Work(kind="model", model=model, length=n) for model, n in models]
    return found + [
        Work(kind="generate", model=model, length=n, new=new) for model, n, new in generate
    ]
