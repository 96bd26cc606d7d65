"""Float64 attention: the only definition of what is right.

Written from the equation in :mod:`mha_export.spec` alone; it shares no code with what emits or
recognises graphs, so that an error there cannot hide here.
"""

from __future__ import annotations

from mha_export.oracle._attention import OracleResult, attention, hidden_pairs
from mha_export.oracle._inputs import Array, Floats, OracleInputs, RotaryInputs, SideInputs
from mha_export.oracle._layer import (
    LatentWeights,
    LayerWeights,
    StreamWeights,
    joint_layer,
    latent_layer,
    layer,
)
from mha_export.oracle._rotary import inverse_frequencies, rotary_tables, rotate

__all__ = [
    "Array",
    "Floats",
    "LatentWeights",
    "LayerWeights",
    "OracleInputs",
    "OracleResult",
    "RotaryInputs",
    "SideInputs",
    "StreamWeights",
    "attention",
    "hidden_pairs",
    "inverse_frequencies",
    "joint_layer",
    "latent_layer",
    "layer",
    "rotary_tables",
    "rotate",
]
