"""Random models of a few thousand weights, written to folders as users have them, or as GGUF.

In: a folder, a seed, changes to the config. Out: config, safetensors and a byte-level tokenizer,
and ways to change or damage them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto

from torch_cacheslide.cope import cope_from_llama

VOCABULARY = 259
SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # byte-level BPE's letter for a space
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
AutoModelForCausalLM: Any = modeling_auto.AutoModelForCausalLM


def write_model(folder: Path, kind: Any = LlamaConfig, seed: int = 0, **changes: Any) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(kind(**{**SIZES, **changes})).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_cope_model(folder: Path, *, npos: int, std: float, seed: int = 0, **changes: Any) -> Path:
    """The same with contextual positions; their embeddings are normal with `std`."""
    torch.manual_seed(seed)
    base: Any = LlamaForCausalLM
    model = cope_from_llama(base(LlamaConfig(**{**SIZES, **changes})), npos)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.cope_embedding, std=std)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> Any:
    """Bytes, two spaces as one piece, and two control tokens."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), SPACE * 2]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(SPACE, SPACE)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    wrapped: Any = PreTrainedTokenizerFast
    return wrapped(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def write_gguf(path: Path, folder: Path, pre: str = "smollm", description: str = "") -> Path:
    """The Llama model of `folder` as float32 GGUF, q and k interleaved as in llama.cpp."""
    tensors = load_file(folder / "model.safetensors")
    writer = GGUFWriter(path, "llama")
    writer.add_description(description)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(VOCABULARY)
    vocabulary = sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([piece for piece, _ in vocabulary])
    writer.add_token_types([1] * 257 + [3] * 2)
    writer.add_token_merges([f"{SPACE} {SPACE}"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in tensors.items():
        writer.add_tensor(gguf_name(name), interleaved(name, tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    }.items():
        name = name.replace(ours, theirs)
    return name


def interleaved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.view(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
