"""What ``--cache`` makes of a model, at every opset it is exported at."""

from __future__ import annotations

import onnx_ir as ir

from mha_export.caches import Cached, StepProof, layout_of, prove_steps, with_cache
from mha_export.decode import KEY, CacheLayout
from mha_export.errors import CheckFailedError, InputError
from mha_export.evaluator import Evaluator
from mha_export.jobs._progress import Progress
from mha_export.recognise import Reason, Recognition, Site
from mha_export.report.records import CacheRecord

KEEP = "keep"

_FIXES = {
    "bidirectional": "an encoder has nothing to cache: leave --cache out",
    "cross-attention": "leave --cache out; only the decoder of a text can be given a cache here",
    "length-fixed": "export the source with a dynamic sequence length",
    "length-as-number": "leave --cache out: the model reads each token anew at every length",
    "mask-from-tokens": "export the source with an attention_mask input",
    "mask-is-an-input": "export the source so that it makes its causal mask itself",
    "static-cache": "leave --cache out, or ask for --cache static: it has one",
    "token-mixing": "leave --cache out: the model works on whole sequences",
}


class Caching:
    """Applies one ``--cache`` setting to the recognitions of one model.

    The first cached model is proven step by step; those at other opsets differ in nothing but the
    spelling of their nodes.
    """

    def __init__(self, mode: str, *, seed: int, progress: Progress) -> None:
        self._mode = mode
        self._seed = seed
        self._progress = progress
        self._proof: StepProof | None = None
        self._made: CacheRecord | None = None

    @property
    def record(self) -> CacheRecord | None:
        """What ``export.json`` says of the cache; None for a model that has none."""
        return self._made

    @property
    def changes_model(self) -> bool:
        """Whether the exported model has other inputs than the source."""
        return self._made is not None and self._made.state in ("added", "converted")

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done, in words."""
        if not self.changes_model:
            return ()
        assert self._made is not None
        assert self._proof is not None
        done = f"cache {self._made.state}: {self._mode}"
        proof = f"proven over {self._proof.steps} steps on {self._proof.engine}"
        return (f"{done}, {proof}; original.onnx is the source with this cache",)

    def applied(self, recognition: Recognition, evaluator: Evaluator) -> Recognition:
        """The attentions of the model with the cache that was asked for.

        Args:
            recognition: of the source.
            evaluator: runs the steps of the proof.

        Errors:
            InputError: it cannot have one; the message begins with the code.
            CheckFailedError: the cached model does not compute what the source does.
        """
        had = {_kind(site) for site in recognition.sites}
        if self._mode == KEEP or had == {self._mode} or not _has_softmax(recognition):
            if had - {None}:
                self._made = _record(self._mode, "kept", layout_of(recognition), None)
            return recognition
        self._progress(f"giving the decoder a {self._mode} cache")
        found = with_cache(recognition, "concat" if self._mode == "concat" else "static")
        if isinstance(found, Reason):
            raise InputError(
                f"--cache {self._mode}: {found.code}: {found.message}", fix=_FIXES.get(found.code)
            )
        proof = self._proven(recognition.model, found, evaluator)
        state = "added" if had == {None} else "converted"
        self._made = _record(self._mode, state, found.layout, proof)
        return found.recognition

    def describe(self, model: ir.Model) -> ir.Model:
        """Write the layout into the file's metadata."""
        layout = None if self._made is None else self._made.layout
        if layout is not None:
            model.metadata_props[KEY] = CacheLayout.from_json(layout).to_text()
        return model

    def _proven(self, original: ir.Model, cached: Cached, evaluator: Evaluator) -> StepProof:
        if self._proof is None:
            self._progress("proving the cache step by step")
            self._proof = prove_steps(original, cached, evaluator=evaluator, seed=self._seed)
            if self._proof.status == "fail":
                raise CheckFailedError(
                    f"--cache {self._mode}: steps-differ: {self._proof.reason}",
                    fix="leave --cache out: the model computes something else token by token",
                )
        return self._proof


def _kind(site: Site) -> str | None:
    cache = site.spec.cache
    if cache is None:
        return None
    return "concat" if cache.growth == "concat" else "static"


def _has_softmax(recognition: Recognition) -> bool:
    return bool(recognition.sites or recognition.rejections)


def _record(
    mode: str, state: str, layout: CacheLayout | None, proof: StepProof | None
) -> CacheRecord:
    return CacheRecord.from_json(
        {
            "asked": mode,
            "state": state,
            "layout": None if layout is None else layout.to_json(),
            "proof": None if proof is None else proof.to_json(),
        }
    )
