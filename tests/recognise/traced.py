"""Small modules as torch's tracing exporter writes them, and the check that a rewrite runs."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.forms import FormParams
from mha_export.recognise import Recognition, Site, recognise
from mha_export.rewrite import RewriteSettings, choose_form, rewrite, with_opset
from mha_export.targets import evaluator_of

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

WIDTH, HEADS, DIM = 32, 4, 8
SCALE = DIM**-0.5


class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Four projections and a body that is given."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.packed = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = torch.nn.Linear(HEADS, HEADS)
        self.codes = torch.nn.Parameter(torch.randn(HEADS, WIDTH))
        self.body = body

    def forward(self, *inputs: Any) -> Any:
        return self.body(self, *inputs)

    def split(self, x: Any) -> Any:
        return x.view(x.shape[0], x.shape[1], HEADS, DIM).transpose(1, 2)

    def heads(self, x: Any) -> tuple[Any, Any, Any]:
        return self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))

    def merge(self, x: Any) -> Any:
        return self.o(x.transpose(1, 2).reshape(x.shape[0], x.shape[2], WIDTH))


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A traced module, and its inputs and outputs at two choices of sizes."""

    model: ir.Model
    samples: Sequence[tuple[dict[str, np.ndarray], list[np.ndarray]]]


def exported(
    body: Callable[..., Any] | torch.nn.Module,  # type: ignore[name-defined]
    samples: Sequence[tuple[Any, ...]],
    axes: Mapping[str, Mapping[int, str]],
) -> Exported:
    module = body.eval() if isinstance(body, torch.nn.Module) else Layer(body).eval()
    file = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            samples[0],
            file,
            input_names=list(axes),
            dynamic_axes={name: dict(given) for name, given in axes.items()},
            dynamo=False,
            opset_version=17,
        )
        runs = []
        for sample in samples:
            made = module(*sample)
            outputs = made if isinstance(made, tuple) else (made,)
            feeds = {n: v.numpy() for n, v in zip(axes, sample, strict=True)}
            runs.append((feeds, [v.numpy() for v in outputs]))
    import onnx

    model = ir.from_proto(onnx.load_from_string(file.getvalue()))
    return Exported(model=model, samples=runs)


def drawn(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


PLAIN = {"x": {0: "b", 1: "s"}}
MASKED = {"x": {0: "b", 1: "s"}, "m": {0: "b", 1: "s"}}


def plain() -> list[tuple[Any, ...]]:
    return [(drawn(2, 7, WIDTH),), (drawn(3, 5, WIDTH),)]


def masked() -> list[tuple[Any, ...]]:
    right = torch.ones(2, 7, dtype=torch.int64)
    right[1, 5:] = 0
    left = torch.ones(3, 5, dtype=torch.int64)
    left[0, :2] = 0
    left[2, :1] = 0
    return [(drawn(2, 7, WIDTH), right), (drawn(3, 5, WIDTH), left)]


def only(recognition: Recognition) -> Any:
    (verdict,) = recognition.verdicts
    return verdict


def check(case: Exported, *, sites: int = 1, status: str = "fused") -> Site:
    """Rewrite every site as Attention and run the whole model at both sizes."""
    evaluator = evaluator_of("cpu")
    found = recognise(with_opset(case.model, 23))
    assert len(found.sites) == sites, [v.to_json() for v in found.verdicts]
    params = FormParams(opset=23)
    done = rewrite(
        found,
        lambda site: choose_form(site, preferred=("onnx",), params=params),
        evaluator=evaluator,
        settings=RewriteSettings(seed=0, battery="quick"),
    )
    states = {name: (o.status, o.reason) for name, o in done.outcomes.items()}
    assert all(state == status for state, _ in states.values()), states
    for feeds, wanted in case.samples:
        actual = list(evaluator.run(done.model, feeds).values())
        for got, want in zip(actual, wanted, strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5, rtol=0)
    return found.sites[0]
