"""What a decoder that has a cache already looks like from outside."""

from __future__ import annotations

from collections.abc import Sequence

from mha_export.decode import CacheLayout, CacheTensor
from mha_export.forms._layout import LENGTH_AXIS
from mha_export.measure._input_roles import InputRole, input_roles
from mha_export.operands import Heads
from mha_export.recognise import Recognition, Site


def layout_of(recognition: Recognition) -> CacheLayout | None:
    """The cache of a decoder, where it grows by concat and its tensors are inputs and outputs.

    None where there is no cache, or one of another interface: what cannot be stated exactly is not
    stated.
    """
    sites = [site for site in recognition.sites if site.spec.cache is not None]
    if not sites or any(
        site.spec.cache is None or site.spec.cache.growth != "concat" for site in recognition.sites
    ):
        return None
    tensors: list[CacheTensor] = []
    for site in sites:
        found = _tensors(site)
        if found is None:
            return None
        tensors += [tensor for tensor in found if tensor not in tensors]
    return _stated(recognition, tensors)


def _tensors(site: Site) -> list[CacheTensor] | None:
    pairs: list[tuple[Heads | None, Heads | None]] = [
        (site.operands.past_key, site.present_key),
        (site.operands.past_value, site.present_value),
    ]
    found: list[CacheTensor] = []
    for past, present in pairs:
        if past is None:
            continue
        if present is None or past.layout is not present.layout:
            return None
        graph = site.graph
        if past.value not in graph.inputs or present.value not in graph.outputs:
            return None
        found.append(
            CacheTensor(
                past=past.value.name or "",
                present=present.value.name or "",
                axis=LENGTH_AXIS[past.layout],
                heads=past.heads,
                dim=past.dim,
            )
        )
    return found


def _stated(recognition: Recognition, tensors: Sequence[CacheTensor]) -> CacheLayout | None:
    pasts = {tensor.past for tensor in tensors}
    presents = {tensor.present for tensor in tensors}
    roles = [role for role in input_roles(recognition.model) if role.name not in pasts]
    tokens = [role.name for role in roles if role.role == "ids"]
    tokens += [role.name for role in roles if role.role == "float" and len(role.shape) == 3]
    positions = _named(roles, "positions")
    masks = _named(roles, "mask")
    outputs = [value.name or "" for value in recognition.model.graph.outputs]
    rest = [name for name in outputs if name not in presents]
    known = {*tokens, *positions, *masks}
    if not tokens or not rest or len(masks) > 1 or len(positions) > 1:
        return None
    if any(role.name not in known for role in roles):
        return None
    return CacheLayout(
        growth="concat",
        tensors=tuple(tensors),
        tokens=tuple(tokens),
        positions=positions[0] if positions else None,
        mask=masks[0] if masks else None,
        logits="logits" if "logits" in rest else rest[0],
    )


def _named(roles: Sequence[InputRole], kind: str) -> list[str]:
    return [role.name for role in roles if role.role == kind and len(role.shape) == 2]
