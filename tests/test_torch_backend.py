"""The torch backend from the outside: equality with transformers, queueing, cancelling, errors."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cacheslide_agents.backend import Backend, GenerationRequest, Receipt, Sampling, load_backend
from cacheslide_agents.errors import BackendError, ContextOverflowError, RequestError
from cacheslide_agents.pages.store import MemoryStore
from cacheslide_agents.policies import CacheSlide, Recompute
from torch_cacheslide import TorchBackend
from torch_cacheslide.jobs import Job, JobQueue

WINDOW = 256


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tokenizers: Any) -> Path:
    """A random Llama with a trained tokenizer, saved as users have them."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = tokenizers("llama3")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(tiny_folder: Path) -> Iterator[TorchBackend]:
    backend = TorchBackend(str(tiny_folder), device="cpu", store_bytes=1 << 26)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def smollm2() -> Iterator[TorchBackend]:
    backend = TorchBackend("smollm2-135m", device="cpu")
    yield backend
    backend.close()


def prompt_ids(seed: int, count: int, vocabulary: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(10, vocabulary, count).tolist()
    return ids


def ask(backend: TorchBackend, ids: list[int], **sampling: Any) -> tuple[list[int], Any]:
    chunks = list(backend.generate(GenerationRequest(ids, sampling=Sampling(**sampling))))
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1]


def receipt_of(backend: TorchBackend, request: GenerationRequest) -> Receipt:
    receipt = list(backend.generate(request))[-1].receipt
    assert receipt is not None
    return receipt


PROMPTS = [
    f"{opening} {topic}"
    for opening in ("The history of", "My favourite thing about", "Write one line on", "2 + 2 and")
    for topic in ("Paris.", "the number seven", "caches\nin agents", "naïve café 🙂", "a red door")
]


@pytest.mark.parametrize("text", PROMPTS)
def test_recompute_generates_what_transformers_generates(smollm2: TorchBackend, text: str) -> None:
    reference = _reference(smollm2)
    ids = smollm2.tokenizer(text)["input_ids"]
    request = GenerationRequest(ids, sampling=Sampling(max_tokens=12), policy=Recompute())
    got = [token for chunk in smollm2.generate(request) for token in chunk.token_ids]
    expected = reference.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=12,
        do_sample=False,
    )
    assert got == expected[0, len(ids) :].tolist()


_LOADED: dict[str, Any] = {}


def _reference(backend: TorchBackend) -> Any:
    """transformers with its own attention, from the same converted files."""
    if backend.model_id not in _LOADED:
        model = AutoModelForCausalLM.from_pretrained(backend.path, attn_implementation="sdpa")
        _LOADED[backend.model_id] = model.train(False)
    return _LOADED[backend.model_id]


def test_it_is_the_backend_registered_as_torch(tiny_folder: Path) -> None:
    backend = load_backend("torch", model=str(tiny_folder), device="cpu")
    assert isinstance(backend, Backend) and isinstance(backend, TorchBackend)
    backend.close()


def test_streamed_text_is_the_decoded_answer(tiny: TorchBackend) -> None:
    ids = prompt_ids(1, 20, 300)
    chunks = list(tiny.generate(GenerationRequest(ids, sampling=Sampling(max_tokens=20))))
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    decoded = tiny.tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(chunk.text for chunk in chunks) == decoded
    assert {chunk.index for chunk in chunks} == {0}
    assert [chunk.receipt is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_scores_are_the_log_probabilities_of_a_dense_run(tiny: TorchBackend) -> None:
    ids, more = prompt_ids(1, 40, 300), prompt_ids(2, 6, 300)
    scores = tiny.score(GenerationRequest(ids), more)
    model = AutoModelForCausalLM.from_pretrained(tiny.path).train(False)
    with torch.inference_mode():
        logits = model(torch.tensor([ids + more])).logits[0, len(ids) - 1 : -1]
    np.testing.assert_allclose(scores.logprobs, logits.log_softmax(-1).numpy(), atol=1e-4)


def test_a_seed_repeats_a_sampled_answer_and_another_does_not(tiny: TorchBackend) -> None:
    ids = prompt_ids(3, 30, 300)
    answers = [
        ask(tiny, ids, max_tokens=16, temperature=1.5, top_p=0.95, top_k=50, seed=seed)[0]
        for seed in (7, 7, 8)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_a_stop_string_ends_the_text_before_it(tiny: TorchBackend) -> None:
    ids = prompt_ids(1, 20, 300)
    whole = "".join(
        c.text for c in tiny.generate(GenerationRequest(ids, sampling=Sampling(max_tokens=24)))
    )
    stop = whole[len(whole) // 2 :][:3]
    request = GenerationRequest(ids, sampling=Sampling(max_tokens=24, stop=(stop,)))
    chunks = list(tiny.generate(request))
    assert "".join(chunk.text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].finish_reason == "stop"


def test_a_stop_token_ends_the_answer(tiny: TorchBackend) -> None:
    ids = prompt_ids(1, 20, 300)
    tokens, _ = ask(tiny, ids, max_tokens=10)
    stopped, last = ask(tiny, ids, max_tokens=10, stop_token_ids=(tokens[4],))
    assert stopped == tokens[: tokens.index(tokens[4]) + 1] and last.finish_reason == "stop"


def test_max_tokens_never_pass_the_window(tiny: TorchBackend) -> None:
    tokens, last = ask(tiny, prompt_ids(1, WINDOW - 5, 300), max_tokens=50, ignore_eos=True)
    assert (len(tokens), last.finish_reason) == (5, "length")


def test_the_longest_prompt_that_fits_is_answered_and_one_more_token_is_not(
    tiny: TorchBackend,
) -> None:
    tokens, _ = ask(tiny, prompt_ids(1, WINDOW - 1, 300), max_tokens=50)
    assert len(tokens) == 1
    with pytest.raises(ContextOverflowError, match=str(WINDOW)):
        tiny.generate(GenerationRequest(prompt_ids(1, WINDOW, 300)))


@pytest.mark.parametrize(
    ("ids", "match"), [([], "empty"), ([5, -1], "-1"), ([5, 10**6], "1000000")], ids=str
)
def test_ids_that_are_no_prompt_are_refused_before_any_work(
    tiny: TorchBackend, ids: list[int], match: str
) -> None:
    with pytest.raises(RequestError, match=match):
        tiny.generate(GenerationRequest(ids))


def test_an_object_that_is_no_policy_is_a_request_error(tiny: TorchBackend) -> None:
    request = GenerationRequest([5, 6, 7], policy=object())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="policy"):
        list(tiny.generate(request))


def test_namespaces_and_tasks_never_share_a_context(tiny: TorchBackend) -> None:
    ids = prompt_ids(1, 60, 300)
    first = GenerationRequest(ids, namespace="a", task="t", sampling=Sampling(max_tokens=1))
    list(tiny.generate(first))
    outcomes = [
        receipt_of(tiny, replace(first, namespace=namespace, task=task)).outcome
        for namespace, task in (("b", "t"), ("a", "u"), ("a", "t"))
    ]
    assert outcomes == ["cold", "cold", "hit"]


def test_a_request_that_is_not_retained_leaves_nothing_behind(tiny: TorchBackend) -> None:
    request = GenerationRequest(
        prompt_ids(1, 60, 300), sampling=Sampling(max_tokens=1), retain=False
    )
    outcomes = [receipt_of(tiny, request).outcome for _ in range(2)]
    assert outcomes == ["cold", "cold"]


def test_warming_makes_the_next_turn_a_hit(tiny: TorchBackend) -> None:
    request = GenerationRequest(prompt_ids(1, 60, 300), sampling=Sampling(max_tokens=1))
    tiny.warm(request)
    assert receipt_of(tiny, request).active_tokens == 1


def test_eight_threads_get_their_own_answers(tiny: TorchBackend) -> None:
    prompts = [prompt_ids(seed, 30 + seed, 300) for seed in range(16)]
    alone = [ask(tiny, ids, max_tokens=8)[0] for ids in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda ids: ask(tiny, ids, max_tokens=8)[0], prompts * 2))
    assert together == alone * 2


def test_async_requests_get_their_own_answers(tiny: TorchBackend) -> None:
    prompts = [prompt_ids(seed, 30 + seed, 300) for seed in range(8)]
    alone = [ask(tiny, ids, max_tokens=8)[0] for ids in prompts]

    async def answer(ids: list[int]) -> list[int]:
        request = GenerationRequest(ids, sampling=Sampling(max_tokens=8))
        return [token async for chunk in tiny.agenerate(request) for token in chunk.token_ids]

    async def all_answers() -> list[list[int]]:
        return await asyncio.gather(*(answer(ids) for ids in prompts))

    assert asyncio.run(all_answers()) == alone


def test_closing_a_stream_stops_it_and_the_next_request_is_served(tiny: TorchBackend) -> None:
    request = GenerationRequest(
        prompt_ids(1, 20, 300), sampling=Sampling(max_tokens=200, ignore_eos=True), session="s"
    )
    stream = tiny.generate(request)
    next(stream)
    stream.close()
    ask(tiny, prompt_ids(2, 20, 300), max_tokens=2)
    (context,) = [c for c in _contexts(tiny) if c.session == "s"]
    assert len(context) < 20 + 200


def test_cancelling_an_async_task_stops_its_request(tiny: TorchBackend) -> None:
    request = GenerationRequest(
        prompt_ids(1, 20, 300), sampling=Sampling(max_tokens=200, ignore_eos=True), session="s"
    )

    async def consume(started: asyncio.Event) -> None:
        async for _ in tiny.agenerate(request):
            started.set()

    async def main() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(consume(started))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    ask(tiny, prompt_ids(2, 20, 300), max_tokens=2)
    (context,) = [c for c in _contexts(tiny) if c.session == "s"]
    assert len(context) < 20 + 200


def _contexts(backend: TorchBackend) -> list[Any]:
    key = backend._runtime.planning.key(GenerationRequest([1]))
    return backend.store.find(key)


def test_a_closed_backend_says_so(tiny_folder: Path) -> None:
    backend = TorchBackend(str(tiny_folder), device="cpu")
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        list(backend.generate(GenerationRequest([5, 6])))


def test_closing_while_others_wait_fails_them_and_hangs_nobody(tiny_folder: Path) -> None:
    backend = TorchBackend(str(tiny_folder), device="cpu")
    ended: list[str] = []

    def consume() -> None:
        try:
            ask(backend, prompt_ids(1, 20, 300), max_tokens=200, ignore_eos=True)
            ended.append("answered")
        except BackendError:
            ended.append("closed")

    threads = [Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    backend.close()
    for thread in threads:
        thread.join(timeout=30)
    assert len(ended) == 4


def test_process_that_forgets_to_close_ends_well_while_its_worker_is_busy() -> None:
    code = """
from threading import Event
from torch_cacheslide.jobs import Abandoned, JobQueue

def work(interrupt):
    begun.set()
    try:
        while True:
            interrupt()
    except Abandoned:
        print("gave way", flush=True)
        raise

begun = Event()
JobQueue("test").idle("forever", work)
begun.wait()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "gave way\n", "")


def test_a_job_that_waits_when_its_queue_is_closed_ends_in_an_error_and_not_in_silence(
    support: Callable[[str], ModuleType],
) -> None:
    queue, began, told = JobQueue("test"), Event(), []

    def first(job: Job) -> None:
        began.set()
        job.cancelled.wait(60)

    def ask() -> None:
        with pytest.raises(BackendError, match="closed while the request waited"):
            list(queue.stream(lambda job: told.append("done")))
        told.append("refused")

    threads = [Thread(target=list, args=(queue.stream(first),)), Thread(target=ask)]
    threads[0].start()
    assert began.wait(60)
    threads[1].start()
    assert support("waiting").until(lambda: queue.waiting == 1)
    queue.close()
    for thread in threads:
        thread.join(60)
    assert told == ["refused"]


def test_closing_leaves_a_given_store_as_it_is(tiny_folder: Path) -> None:
    store = MemoryStore(1 << 26)
    backend = TorchBackend(str(tiny_folder), device="cpu", store=store)
    ask(backend, prompt_ids(1, 60, 300), max_tokens=1)
    backend.close()
    assert store.metrics()["contexts"] == 1


def test_a_backend_that_is_dropped_unclosed_lets_its_model_go(tiny_folder: Path) -> None:
    backend = TorchBackend(str(tiny_folder), device="cpu")
    ask(backend, prompt_ids(1, 60, 300), max_tokens=1)
    alive = weakref.ref(backend)
    del backend
    gc.collect()
    assert alive() is None


def test_a_backend_that_is_dropped_unclosed_ends_its_worker(
    tiny_folder: Path, support: Callable[[str], ModuleType]
) -> None:
    others = set(threading.enumerate())
    backend = TorchBackend(str(tiny_folder), device="cpu")
    ask(backend, prompt_ids(1, 60, 300), max_tokens=1)
    (worker,) = set(threading.enumerate()) - others
    del backend
    gc.collect()
    assert support("waiting").until(lambda: not worker.is_alive())


def test_an_answer_holds_the_backend_that_gives_it(tiny_folder: Path) -> None:
    request = GenerationRequest(
        prompt_ids(1, 60, 300), sampling=Sampling(max_tokens=3, ignore_eos=True)
    )
    chunks = TorchBackend(str(tiny_folder), device="cpu").generate(request)
    gc.collect()
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]


async def test_an_awaited_answer_holds_it_too(tiny_folder: Path) -> None:
    request = GenerationRequest(
        prompt_ids(1, 60, 300), sampling=Sampling(max_tokens=3, ignore_eos=True)
    )
    chunks = TorchBackend(str(tiny_folder), device="cpu").agenerate(request)
    gc.collect()
    assert [chunk.finish_reason async for chunk in chunks] == [None, None, "length"]


def test_continuations_that_cannot_be_scored_are_refused_by_name(tiny: TorchBackend) -> None:
    request = GenerationRequest(prompt_ids(1, 60, 300))
    with pytest.raises(RequestError, match="continuation_ids holds 1000000"):
        tiny.score(request, [5, 10**6])
    with pytest.raises(ContextOverflowError, match="room for 200 new ones"):
        tiny.score(request, [5] * 200)


def test_a_policy_given_to_the_backend_is_the_default(tiny_folder: Path) -> None:
    backend = TorchBackend(str(tiny_folder), device="cpu", policy=Recompute())
    ids = prompt_ids(1, 60, 300)
    assert [ask(backend, ids, max_tokens=1)[1].receipt.policy for _ in range(2)] == [
        "recompute"
    ] * 2
    default = TorchBackend(str(tiny_folder), device="cpu")
    assert ask(default, ids, max_tokens=1)[1].receipt.policy == CacheSlide().name
    backend.close()
    default.close()


def test_metrics_add_up_over_requests(tiny: TorchBackend) -> None:
    ids = prompt_ids(1, 60, 300)
    for _ in range(2):
        ask(tiny, ids, max_tokens=1)
    metrics = tiny.metrics()
    assert (metrics["requests"], metrics["prompt_tokens"]) == (2, 120)
    assert (metrics["outcome_cold"], metrics["outcome_hit"]) == (1, 1)
    assert metrics["reused_tokens"] + metrics["active_tokens"] == 120
