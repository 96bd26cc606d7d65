"""Plants every fault in every base and form, and counts who sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.forms import Form, FormParams, Supported, form_named
from mha_export.forms._weights import weight_shapes
from mha_export.measure._float64 import with_float64
from mha_export.measure.faults._bases import PLAIN_OPSET, Base, graph_of, ways_to_state
from mha_export.measure.faults._change import Change
from mha_export.measure.faults._edited import EDITED
from mha_export.measure.faults._engines import Polygraphy, engine, verdict
from mha_export.measure.faults._stated import STATED
from mha_export.measure.faults._weighted import WEIGHTED
from mha_export.measure.model_inputs import ModelCase, model_cases
from mha_export.measure.reference_run import Expected, ModelReference
from mha_export.targets._capabilities import shipped
from mha_export.targets.reference import ReferenceSession

Arrays = Mapping[str, np.ndarray]
FAULTS = {**STATED, **WEIGHTED, **EDITED}
TARGETS = ("cpu", "reference")
SAME = 1e-9
"""Two float64 outputs nearer than this, relative to the largest entry, are the same function."""
VARIANTS = ("grouped", "tiled", "trt")
"""Forms in plain ops beside ``primitive``: judged for false alarms, planted in only when asked."""
PLAIN = ("primitive", *VARIANTS)


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One fault in one form of one base. ``None`` as a catch: it was not or could not be asked."""

    fault: str
    detail: str
    base: str
    form: str
    cpu: bool | None = None
    reference: bool | None = None
    case: str | None = None
    polygraphy: bool | None = None
    polygraphy_sized: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Right:
    """A right form of a base on a target, and the first case that was not a pass."""

    base: str
    form: str
    target: str
    status: str
    reason: str | None = None
    polygraphy_sized: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """Everything one base gave. ``equivalent``: changes that change no float64 output."""

    planted: tuple[Planted, ...]
    equivalent: tuple[tuple[str, str, str], ...]
    right: tuple[Right, ...]


class Bench:
    """One base: its reference, its cases, its forms.

    Args:
        base: the right layer.
        seed: of the inputs.
        polygraphy: whether Polygraphy is asked too (it must be installed).
        forms: names of the forms to look at; none: all that state the base.
        targets: ``cpu``, ``reference`` or both; faults go into the forms that pass on the first.
    """

    def __init__(
        self,
        base: Base,
        *,
        seed: int = 0,
        polygraphy: bool = True,
        forms: Sequence[str] = (),
        targets: Sequence[str] = TARGETS,
    ) -> None:
        self._base = base
        self._named = bool(forms)
        self._targets = tuple(targets)
        self._params = FormParams(opset=PLAIN_OPSET)
        self._primitive = form_named("primitive")
        self._right = self._graph(self._primitive, self._params, Change(detail=""))
        assert self._right is not None
        self._reference = ModelReference(self._right)
        self._expected = _telling_first(
            self._reference.expected_battery(model_cases(self._right, seed=seed))
        )
        self._forms = [w for w in ways_to_state(base.spec) if not forms or w[0].name in forms]
        self._polygraphy = Polygraphy(self._right, self._ordinary) if polygraphy else None
        self._other = tuple(_wilder(model_cases(self._right, seed=seed), seed))
        self._wide = with_float64(self._right)
        self._exact = [_run(ReferenceSession(self._wide), case) for case in self._other]

    def right(self) -> Iterator[Right]:
        """Every form and target, unmutated."""
        for form, params in self._forms:
            model = self._graph(form, params, Change(detail=""))
            assert model is not None
            for target in self._targets:
                yield self._judged(form, target, model)

    def _judged(self, form: Form, target: str, model: ir.Model) -> Right:
        base = self._base.name
        known = shipped(target)
        veto = None if known is None else known.refusal(form.name, self._base.spec)
        if veto is not None:
            return Right(base=base, form=form.name, target=target, status="vetoed", reason=veto)
        candidate = engine(target, model)
        if candidate is None:
            return Right(base=base, form=form.name, target=target, status="not loaded")
        record = verdict(self._expected, candidate)
        alarm = None
        if target == "cpu" and self._polygraphy is not None:
            _, alarm = self._polygraphy.differ(model)
        return Right(
            base=base,
            form=form.name,
            target=target,
            status="pass" if record is None else record.status,
            reason=None if record is None else f"{record.name}: {record.message}",
            polygraphy_sized=alarm,
        )

    @property
    def _ordinary(self) -> ModelCase:
        return next(item.case for item in self._expected if item.case.name == "ordinary")

    def found(
        self,
        faults: Sequence[str] = (),
        progress: Callable[[Planted], None] = lambda planted: None,
    ) -> Found:
        """Plant, count, and ask everybody."""
        right = tuple(self.right())
        usable = {r.form for r in right if r.target == self._targets[0] and r.status == "pass"}
        planted, equivalent = [], []
        for name, fault in FAULTS.items():
            if faults and name not in faults:
                continue
            for change in fault(self._base):
                differs = self._differs(change)
                if differs is None:
                    continue
                if not differs:
                    equivalent.append((name, change.detail, self._base.name))
                    continue
                for form, params in self._forms:
                    if form.name not in usable or (change.plain and form.name not in PLAIN):
                        continue
                    if form.name in VARIANTS and not self._named:
                        continue
                    wrong = self._graph(form, params, change)
                    if wrong is not None:
                        planted.append(self._shown(name, change, form, wrong))
                        progress(planted[-1])
        return Found(planted=tuple(planted), equivalent=tuple(equivalent), right=right)

    def _graph(self, form: Form, params: FormParams, change: Change) -> ir.Model | None:
        """The wrong graph; None where the form cannot be made to say it."""
        spec = change.spec or self._base.spec
        if not isinstance(form.supports(spec, params), Supported):
            return None
        weights = change.weights or self._base.weights
        chosen = {name: weights[name] for name in weight_shapes(spec) if name in weights}
        if chosen.keys() != weight_shapes(spec).keys():
            return None
        model = graph_of(form, params, spec, chosen)
        return model if change.edit is None or change.edit(model) else None

    def _differs(self, change: Change) -> bool | None:
        """Whether a float64 output differs on any input; None: it cannot be planted at all."""
        plain = Change(detail="", spec=change.spec, weights=change.weights)
        model = self._graph(self._primitive, self._params, plain)
        if model is None:
            return None
        wide = with_float64(model)
        if change.edit is not None and not change.edit(wide):
            return None
        session = ReferenceSession(wide)
        for case, exact in zip(self._other, self._exact, strict=True):
            if exact is not None and _apart(exact, _run(session, case)):
                return True
        return False

    def _shown(self, name: str, change: Change, form: Form, wrong: ir.Model) -> Planted:
        caught: dict[str, bool | None] = {}
        by: str | None = None
        for target in self._targets:
            candidate = engine(target, wrong)
            if candidate is None:
                # The right graph loads: one that does not is an ``error``, and seen.
                caught[target] = True if target == "cpu" else None
                continue
            record = verdict(self._expected, candidate)
            caught[target] = record is not None and record.status in ("fail", "error")
            by = by or (None if record is None else f"{record.name} ({record.status})")
        poly, sized = None, None
        if self._polygraphy is not None:
            poly, sized = self._polygraphy.differ(wrong)
        return Planted(
            fault=name,
            detail=change.detail,
            base=self._base.name,
            form=form.name,
            cpu=caught.get("cpu"),
            reference=caught.get("reference"),
            case=by,
            polygraphy=poly,
            polygraphy_sized=sized,
        )


def _wilder(cases: Sequence[ModelCase], seed: int) -> Iterator[ModelCase]:
    """The battery, and inputs it does not draw: whether a fault counts must not hang on it.

    Numbers of any size between 1e-5 and 1e4, keys that take part at random (in a row of its own
    none, in another all), lengths from nothing to everything.
    """
    yield from cases
    stream = np.random.default_rng([seed, 13])
    for case in cases:
        inputs = dict(case.inputs)
        for name, array in case.inputs.items():
            if name in ("key_padding", "keep"):
                chance = stream.choice([0.0, 0.3, 0.7, 1.0], size=array.shape[:1])
                chance = chance.reshape(-1, *[1] * (array.ndim - 1))
                inputs[name] = (stream.random(array.shape) < chance).astype(array.dtype)
            elif name == "kv_lengths" and "past_key" not in inputs:
                inputs[name] = stream.integers(0, array.max() + 1, array.shape)
            elif array.dtype.kind == "f":
                size = 10.0 ** stream.uniform(-5, 4)
                inputs[name] = (size * stream.standard_normal(array.shape)).astype(array.dtype)
        yield ModelCase(name=f"wild {case.name}", inputs=inputs, dims=case.dims)


def _telling_first(expected: Sequence[Expected]) -> tuple[Expected, ...]:
    """The same cases, those that catch most first: a wrong graph is left at the first it fails."""
    return tuple(sorted(expected, key=lambda item: item.case.name != "large values"))


def _run(session: ReferenceSession, case: ModelCase) -> dict[str, np.ndarray] | None:
    wide = {
        name: array if array.dtype.kind in "biu" else array.astype(np.float64)
        for name, array in case.inputs.items()
    }
    try:
        return session.run(wide)
    except Exception:  # sizes the graph does not take
        return None


def _apart(exact: Arrays, other: Arrays | None) -> bool:
    if other is None or exact.keys() - other.keys():
        return True
    for name, want in exact.items():
        got = other[name]
        if got.shape != want.shape or not np.array_equal(np.isfinite(got), np.isfinite(want)):
            return True
        finite = np.isfinite(want)
        size = np.max(np.abs(want), initial=0.0, where=finite)
        off = np.zeros_like(want)
        np.subtract(got, want, out=off, where=finite)
        if np.max(np.abs(off), initial=0.0) > SAME * size:
            return True
    return False
