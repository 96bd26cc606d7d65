"""transformers' own classes from tiny configs, random weights: what ``sweep_models`` exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from _sweep_modules import Inputs, Model
from torch import nn

WORDS = 64
DYNAMO = ("dynamo.18", "dynamo.23", "dynamo.24", "program")


class Adapter(nn.Module):
    """Tensors in by position, one tensor out."""

    def __init__(self, model: Any, names: tuple[str, ...], output: str) -> None:
        super().__init__()
        self.model, self.names, self.output = model, names, output

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        keywords = dict(zip(self.names, tensors, strict=True))
        if self.output == "last_hidden_state" and getattr(self.model.config, "is_decoder", False):
            keywords["use_cache"] = False
        return getattr(self.model(**keywords, return_dict=True), self.output)


def made(kind: str, names: tuple[str, ...], output: str, **config: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        attention = config.get("attn", "eager")
        given = {key: value for key, value in config.items() if key != "attn"}
        settings = getattr(transformers, f"{kind}Config")(**given)
        settings._attn_implementation = attention
        settings._experts_implementation = "batched_mm"
        if hasattr(settings, "use_cache"):
            settings.use_cache = False
        model = getattr(transformers, f"{kind}Model")(settings)
        model.config._attn_implementation = attention
        return Adapter(model.eval(), names, output)

    return make


def tokens(batch: int, length: int) -> Inputs:
    random = torch.Generator().manual_seed(length)
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length - 2 :] = 0
    ids = torch.randint(3, WORDS, (batch, length), generator=random)
    return {"input_ids": ids, "attention_mask": mask}


def image(batch: int, length: int) -> Inputs:
    random = torch.Generator().manual_seed(length)
    return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=random)}


def sound(batch: int, length: int) -> Inputs:
    random = torch.Generator().manual_seed(length)
    return {"input_values": torch.randn(batch, 400 + 80 * length, generator=random)}


def pair(batch: int, length: int) -> Inputs:
    given = tokens(batch, length)
    return {**given, "decoder_input_ids": tokens(batch, length + 2)["input_ids"]}


TEXT = {"input_ids": {0: "b", 1: "s"}, "attention_mask": {0: "b", 1: "s"}}
INPUTS: dict[str, tuple[Callable[[int, int], Inputs], dict[str, dict[int, str]]]] = {
    "text": (tokens, TEXT),
    "image": (image, {"pixel_values": {0: "b"}}),
    "sound": (sound, {"input_values": {0: "b", 1: "t"}}),
    "pair": (pair, {**TEXT, "decoder_input_ids": {0: "b", 1: "d"}}),
}

ENCODER = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
DECODER = {**ENCODER, "num_key_value_heads": 2, "pad_token_id": 0}
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
SPEECH = {
    **ENCODER, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip


def transformers_models() -> Iterator[Model]:
    """All of them."""

    def row(kind: str, config: dict[str, Any], what: str = "text", **other: Any) -> Model:
        inputs, axes = INPUTS[what]
        names = tuple(inputs(2, 7))
        attention = config.get("attn", "eager")
        output = other.pop("output", "last_hidden_state")
        settings: dict[str, Any] = {"attentions": 2, **other}
        return Model(
            name=f"{kind} ({attention})",
            make=made(kind, names, output, **config),
            inputs=inputs,
            axes=axes,
            **settings,
        )

    grouped = {"kv_heads": 2}
    for kind in ("Roberta", "Electra", "MPNet", "Albert", "XLMRoberta"):
        config = {**ENCODER, "pad_token_id": 1, "embedding_size": 32}
        yield row(kind, {**config, "attn": "sdpa"} if kind == "XLMRoberta" else config)
    yield row("DistilBert", {"vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 4,
                             "hidden_dim": 48, "attn": "sdpa"})  # fmt: skip
    yield row("ModernBert", {**ENCODER, "pad_token_id": 0, "global_attn_every_n_layers": 2,
                             "local_attention": 4})  # fmt: skip
    yield row("Esm", {**ENCODER, "position_embedding_type": "rotary", "pad_token_id": 1,
                      "mask_token_id": 2})  # fmt: skip
    yield row("Mixtral", {**DECODER, "num_local_experts": 2}, **grouped)
    yield row("Cohere", DECODER, exporters=DYNAMO, **grouped)
    yield row("Glm", {**DECODER, "head_dim": 8}, exporters=DYNAMO, **grouped)
    yield row("Olmo2", DECODER, **grouped)
    yield row("Granite", {**DECODER, "attn": "sdpa"}, **grouped)
    yield row("StableLm", DECODER, **grouped)
    yield row("Starcoder2", {**DECODER, "sliding_window": 4}, **grouped)
    yield row("Gemma3Text", {**DECODER, "head_dim": 8, "sliding_window": 4}, **grouped)
    yield row("Phi", {**DECODER, "num_key_value_heads": 4, "partial_rotary_factor": 0.5})
    yield row("Falcon", {**ENCODER, "new_decoder_architecture": True, "num_kv_heads": 2},
              **grouped)  # fmt: skip
    yield row("Falcon", {**ENCODER, "new_decoder_architecture": True, "num_kv_heads": 2,
                         "attn": "sdpa"}, **grouped)  # fmt: skip
    yield row("Bloom", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4})
    yield row("Mpt", {"vocab_size": WORDS, "d_model": 32, "n_layers": 2, "n_heads": 4,
                      "expansion_ratio": 2})  # fmt: skip
    yield row("OPT", {**ENCODER, "ffn_dim": 48, "word_embed_proj_dim": 32})
    yield row("GPTNeoX", {**ENCODER, "rotary_pct": 0.5})
    yield row("GPTJ", {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4,
                       "rotary_dim": 4, "n_positions": 64})  # fmt: skip
    yield row("GPTNeo", {"vocab_size": WORDS, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                         "attention_types": [[["global", "local"], 1]], "window_size": 4,
                         "max_position_embeddings": 64})  # fmt: skip
    yield row("XGLM", {"vocab_size": WORDS, "d_model": 32, "ffn_dim": 48, "num_layers": 2,
                       "attention_heads": 4, "max_position_embeddings": 64})  # fmt: skip
    yield row("Bart", SEQ2SEQ, "pair", attentions=3)
    yield row("Marian", {**SEQ2SEQ, "attn": "sdpa"}, "pair", attentions=3)
    yield row("T5", {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1,
                     "num_decoder_layers": 1, "num_heads": 4}, "pair", attentions=3)  # fmt: skip
    yield row("ViT", {**VISION, "attn": "sdpa"}, "image")
    yield row("Dinov2", VISION, "image")
    yield row("Beit", {**VISION, "use_relative_position_bias": True}, "image")
    yield row("SiglipVision", {**VISION, "attn": "sdpa"}, "image", attentions=3)
    yield row("Segformer", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_encoder_blocks": 2,
                            "num_attention_heads": [2, 4], "sr_ratios": [2, 1],
                            "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2],
                            "decoder_hidden_size": 16}, "image", heads=None)  # fmt: skip
    yield row("Swinv2", {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2],
                         "num_heads": [4], "window_size": 4}, "image")  # fmt: skip
    yield row("Wav2Vec2", SPEECH, "sound")
    yield row("Hubert", {**SPEECH, "attn": "sdpa"}, "sound")
