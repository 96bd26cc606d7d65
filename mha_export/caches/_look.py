"""A decoder at two lengths of one batch: which axes of a value are as long as the tokens are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from mha_export.caches._refusal import Refused
from mha_export.recognise import Site
from mha_export.recognise._evaluate import Context, SizedView
from mha_export.recognise._evaluate_contents import STEERING
from mha_export.rewrite._sizes import SizedSite, size_at, sized_sites

STEP = 4
"""By how much the second length is longer."""


class Look:
    """Shapes and contents at two lengths.

    ``lengths`` are the tokens at either. An axis *grows* where its sizes differ.
    """

    def __init__(self, model: ir.Model, sites: Iterable[Site]) -> None:
        self.model = model
        self.context = Context(model)
        first, second = _two_lengths(list(sites), self.context)
        self.numbers = first.numbers
        self.lengths = (first.s, second.s)
        self.views: tuple[SizedView, SizedView] = (first.view, second.view)

    def shapes(self, value: ir.Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape at either length.

        Raises Refused where it depends on data.
        """
        first, second = (view.shape(value) for view in self.views)
        if first is None or second is None:
            raise self._shapeless(value)
        return first, second

    def _shapeless(self, value: ir.Value) -> Refused:
        """Why there is no shape: the first op above that has none of its own."""
        node = value.producer()
        while node is not None:
            above = [v for v in node.inputs if v is not None and self._is_unknown(v)]
            if not above:
                break
            value, node = above[0], above[0].producer()
        steering = () if node is None else STEERING.get(node.op_type, ())
        told = node is not None and all(
            self.arrays(item) is not None
            for place, item in enumerate(node.inputs)
            if place in steering and item is not None
        )
        name = value.name
        if steering and told:
            code, message = (
                "length-fixed",
                f"{name!r} has a number of tokens written into its shape",
            )
        else:
            code, message = "shape-depends-on-data", f"the shape of {name!r} depends on the tokens"
        return Refused(code, message, value=value, nodes=[] if node is None else [node])

    def _is_unknown(self, value: ir.Value) -> bool:
        return any(view.shape(value) is None for view in self.views)

    def rank(self, value: ir.Value) -> int:
        return len(self.shapes(value)[0])

    def growing(self, value: ir.Value) -> list[int]:
        """The axes that are longer at the second length."""
        first, second = self.shapes(value)
        return [axis for axis, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]

    def arrays(self, value: ir.Value) -> tuple[np.ndarray, np.ndarray] | None:
        """The content at either length, or None where it depends on an input."""
        first, second = (view.array(value) for view in self.views)
        return None if first is None or second is None else (first, second)

    def is_length(self, value: ir.Value, *, less: int = 0) -> bool:
        """Whether every entry is the number of tokens, less a number, at both lengths."""
        found = self.arrays(value)
        return found is not None and all(
            bool(np.all(array == length - less))
            for array, length in zip(found, self.lengths, strict=True)
        )

    def is_constant(self, value: ir.Value, number: int) -> bool:
        """Whether every entry is ``number`` at both lengths."""
        found = self.arrays(value)
        return found is not None and all(bool(np.all(array == number)) for array in found)


def _two_lengths(sites: list[Site], context: Context) -> tuple[SizedSite, SizedSite]:
    site = sites[0]
    found = next(iter(sized_sites(site, context, wanted=1)), None)
    if found is None:
        raise Refused(
            "length-fixed",
            "no batch and sequence length could be found at which the attention fits together",
            nodes=[site.anchor],
        )
    for numbers in _longer(found):
        other = size_at(site, context, numbers)
        if other is not None and (other.s, other.n, other.b) == (
            found.s + STEP,
            found.n + STEP,
            found.b,
        ):
            return found, other
    raise Refused(
        "length-fixed",
        f"the sequence length {found.s} is written into the graph: at any other it does not run",
        nodes=[site.anchor],
    )


def _longer(found: SizedSite) -> Iterable[Mapping[str, int]]:
    """The same sizes with one symbol, or all that are as long as the tokens, increased."""
    equal = [name for name, number in found.numbers.items() if number == found.s]
    for name in equal:
        yield {**found.numbers, name: found.s + STEP}
    yield {**found.numbers, **dict.fromkeys(equal, found.s + STEP)}
