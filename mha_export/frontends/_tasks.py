"""What a Hugging Face model is exported for: its class, inputs, outputs, and sample inputs.

A task is a row of :data:`TASKS`; a new one is a new row.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mha_export.errors import InputError
from mha_export.frontends._traceable import Axes, Traceable

DEFAULT_DIMS: Mapping[str, int] = {"batch": 2, "seq": 7, "past_seq": 5, "encoder_seq": 6}
"""Sizes of a sample: unequal, and above 1, so that no exporter merges or drops an axis."""

PAST_TASK = "text-generation-with-past"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One purpose.

    Attributes:
        auto_class: the transformers class that loads a model for it.
        architectures: endings of ``config.architectures`` that were made for it.
        outputs: fields of the model's result that become outputs, in order.
        past: keys and values of earlier tokens are inputs and outputs.
        inputs: what the model reads: ``text``, ``text pair`` (encoder and decoder) or ``image``.
    """

    auto_class: str
    architectures: tuple[str, ...]
    outputs: tuple[str, ...] = ("logits",)
    past: bool = False
    inputs: str = "text"


TASKS: Mapping[str, Task] = {
    PAST_TASK: Task(
        auto_class="AutoModelForCausalLM",
        architectures=("ForCausalLM", "LMHeadModel"),
        past=True,
    ),
    "text-generation": Task(auto_class="AutoModelForCausalLM", architectures=()),
    "fill-mask": Task(auto_class="AutoModelForMaskedLM", architectures=("ForMaskedLM",)),
    "text-classification": Task(
        auto_class="AutoModelForSequenceClassification",
        architectures=("ForSequenceClassification",),
    ),
    "token-classification": Task(
        auto_class="AutoModelForTokenClassification", architectures=("ForTokenClassification",)
    ),
    "question-answering": Task(
        auto_class="AutoModelForQuestionAnswering",
        architectures=("ForQuestionAnswering",),
        outputs=("start_logits", "end_logits"),
    ),
    "text2text-generation": Task(
        auto_class="AutoModelForSeq2SeqLM",
        architectures=("ForConditionalGeneration",),
        inputs="text pair",
    ),
    "image-classification": Task(
        auto_class="AutoModelForImageClassification",
        architectures=("ForImageClassification",),
        inputs="image",
    ),
    "image-feature-extraction": Task(
        auto_class="AutoModel",
        architectures=(),
        outputs=("last_hidden_state",),
        inputs="image",
    ),
    "feature-extraction": Task(
        auto_class="AutoModel", architectures=("Model",), outputs=("last_hidden_state",)
    ),
}


def task_named(name: str) -> Task:
    """The task called ``name``.

    Errors:
        InputError: no such task; the message lists those there are.
    """
    if name not in TASKS:
        raise InputError(f"unknown task {name!r}", fix=f"choose one of: {', '.join(sorted(TASKS))}")
    return TASKS[name]


def task_of(config: Any) -> str:
    """The task the weights were made for, by the architecture that ``config.json`` states."""
    architecture = (getattr(config, "architectures", None) or ["Model"])[0]
    return task_of_class(str(architecture), config)


def task_of_class(architecture: str, config: Any) -> str:
    """The task a transformers class of this name is for."""
    for name, task in TASKS.items():
        if architecture.endswith(task.architectures) and task.architectures:
            image = hasattr(config, "image_size") and hasattr(config, "patch_size")
            return "image-feature-extraction" if image and name == "feature-extraction" else name
    return "feature-extraction"


def traceable_for(
    model: Any, task_name: str, *, dims: Mapping[str, int], seed: int
) -> tuple[Traceable, dict[str, np.ndarray]]:
    """The model as an exporter takes it, and sample inputs for the graph that comes out.

    Args:
        model: a ``transformers.PreTrainedModel`` of the task's class.
        task_name: a key of :data:`TASKS`.
        dims: sizes of the sample by axis name; :data:`DEFAULT_DIMS` for the rest.
        seed: of the sample inputs.
    """
    import torch

    task = task_named(task_name)
    sizes = {**DEFAULT_DIMS, **{name: size for name, size in dims.items() if size > 0}}
    arrays, axes = _inputs(model, task, sizes, np.random.default_rng(seed))
    layers = 0
    if task.past:
        past, past_axes = _past_inputs(model, sizes, np.random.default_rng(seed + 1))
        arrays |= past
        axes |= past_axes
        layers = len(past) // 2
    outputs = (*task.outputs, *_present_names(layers))
    text_axes = {0: "batch", 1: "seq"}
    output_axes: dict[str, Axes] = {
        name: {0: "batch"} if name == "logits" and "classification" in task_name else text_axes
        for name in task.outputs
    }
    if task_name == "token-classification":
        output_axes["logits"] = text_axes
    if task.inputs == "image":
        output_axes = {name: {0: "batch"} for name in task.outputs}
    output_axes |= {name: {0: "batch", 2: "total_seq"} for name in _present_names(layers)}
    module = _adapter(model, tuple(arrays), task.outputs, layers)
    traceable = Traceable(
        module=module,
        args=tuple(torch.from_numpy(array) for array in arrays.values()),
        input_names=tuple(arrays),
        output_names=outputs,
        input_axes=tuple(axes[name] for name in arrays),
        output_axes=output_axes,
    )
    return traceable, arrays


def _inputs(
    model: Any, task: Task, sizes: Mapping[str, int], random: np.random.Generator
) -> tuple[dict[str, np.ndarray], dict[str, Axes]]:
    takes = inspect.signature(model.forward).parameters
    batch, seq = sizes["batch"], sizes["seq"]
    past = sizes["past_seq"] if task.past else 0
    if task.inputs == "image":
        return _image_inputs(model.config, batch, random)
    encoder = sizes["encoder_seq"] if task.inputs == "text pair" else seq
    vocabulary = int(model.config.get_text_config().vocab_size)
    arrays = {"input_ids": random.integers(1, vocabulary, (batch, encoder), dtype=np.int64)}
    encoder_axis = "encoder_seq" if task.inputs == "text pair" else "seq"
    axes: dict[str, Axes] = {"input_ids": {0: "batch", 1: encoder_axis}}
    if "attention_mask" in takes:
        mask = np.ones((batch, past + encoder), dtype=np.int64)
        if batch > 1 and encoder > 2 and not past:
            mask[-1, encoder - 2 :] = 0
        arrays["attention_mask"] = mask
        axes["attention_mask"] = {0: "batch", 1: "total_seq" if past else encoder_axis}
    if "token_type_ids" in takes and getattr(model.config, "type_vocab_size", 0) > 1:
        arrays["token_type_ids"] = np.zeros((batch, seq), dtype=np.int64)
        axes["token_type_ids"] = {0: "batch", 1: "seq"}
    if "position_ids" in takes and task.auto_class == "AutoModelForCausalLM":
        positions = np.arange(past, past + seq, dtype=np.int64)
        arrays["position_ids"] = np.tile(positions, (batch, 1))
        axes["position_ids"] = {0: "batch", 1: "seq"}
    if task.inputs == "text pair":
        arrays["decoder_input_ids"] = random.integers(1, vocabulary, (batch, seq), dtype=np.int64)
        axes["decoder_input_ids"] = {0: "batch", 1: "seq"}
    return arrays, axes


def _image_inputs(
    config: Any, batch: int, random: np.random.Generator
) -> tuple[dict[str, np.ndarray], dict[str, Axes]]:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    if size is None:
        raise InputError(
            f"the config of {config.model_type} states no image_size",
            fix="load the model in Python and give open_source the module with inputs=",
        )
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    channels = int(getattr(vision, "num_channels", 3))
    pixels = random.standard_normal((batch, channels, height, width)).astype(np.float32)
    return {"pixel_values": pixels}, {"pixel_values": {0: "batch"}}


def _past_inputs(
    model: Any, sizes: Mapping[str, int], random: np.random.Generator
) -> tuple[dict[str, np.ndarray], dict[str, Axes]]:
    """Past keys and values of the shapes that the model itself writes, read off a trial run."""
    import torch

    ids = torch.ones((1, 2), dtype=torch.int64)
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    layers = getattr(cache, "layers", None)
    if layers is None or any(getattr(layer, "keys", None) is None for layer in layers):
        raise InputError(
            f"{type(model).__name__} keeps no cache of keys and values for every layer",
            fix="export it with --task text-generation",
        )
    arrays: dict[str, np.ndarray] = {}
    for index, layer in enumerate(layers):
        for kind, tensor in (("key", layer.keys), ("value", layer.values)):
            shape = (sizes["batch"], tensor.shape[1], sizes["past_seq"], tensor.shape[3])
            array = 0.5 * random.standard_normal(shape)
            arrays[f"past_key_values.{index}.{kind}"] = array.astype(np.float32)
    return arrays, {name: {0: "batch", 2: "past_seq"} for name in arrays}


def _present_names(layers: int) -> tuple[str, ...]:
    return tuple(f"present.{index}.{kind}" for index in range(layers) for kind in ("key", "value"))


def _adapter(model: Any, names: tuple[str, ...], outputs: tuple[str, ...], layers: int) -> Any:
    """Positional tensors in, tensors out, around a model of keywords and dataclasses."""
    import torch
    from transformers import DynamicCache

    plain = tuple(name for name in names if not name.startswith("past_key_values."))
    fixed: dict[str, Any] = {"return_dict": True}
    if "use_cache" in inspect.signature(model.forward).parameters:
        fixed["use_cache"] = bool(layers)

    class Adapter(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: Any) -> Any:
            keywords = dict(zip(plain, tensors, strict=False))
            if layers:
                flat = tensors[len(plain) :]
                pairs = list(zip(flat[0::2], flat[1::2], strict=True))
                keywords["past_key_values"] = DynamicCache(pairs)
            result = self.model(**keywords, **fixed)
            made = [getattr(result, name) for name in outputs]
            for layer in result.past_key_values.layers if layers else ():
                made += [layer.keys, layer.values]
            return tuple(made)

    return Adapter().eval()
