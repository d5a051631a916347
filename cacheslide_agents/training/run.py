"""The whole job of `cacheslide train`: load, train, measure, write.

In: the base model's name, text files, a recipe, an output folder. Out: the folder with a converted
model in it, and its card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cacheslide_agents.errors import DataError
from cacheslide_agents.training.artifact import Card, save_adapter, save_checkpoint
from cacheslide_agents.training.convert import CHECKPOINT, Conversion, Report
from cacheslide_agents.training.corpus import Corpus, read_texts
from cacheslide_agents.training.evaluate import HeldOut, check_held_out, evaluate
from cacheslide_agents.training.material import Material
from cacheslide_agents.training.output import LEAST_ROOM, check_free, claimed
from cacheslide_agents.training.recipe import Recipe
from cacheslide_agents.training.requests import Requests
from torch_cacheslide.adapter import Adapter
from torch_cacheslide.binding import BaseTensor, bind
from torch_cacheslide.models import LoadedModel, load_model

ADAPTER, MERGED = "adapter", "model"


@dataclass(frozen=True)
class Job:
    """Text files are JSONL with a `text` field, `requests` are logs as `cacheslide replay` reads
    them; `out` keeps the checkpoint and the result.

    `start`: the folder of an adapter that training begins with. `windows` held-out windows are
    read at each of `eval_lengths` tokens.
    """

    model: str
    train_files: Sequence[Path]
    valid_files: Sequence[Path]
    out: Path
    recipe: Recipe
    start: Path | None = None
    requests: Sequence[Path] = ()
    device: str = "cpu"
    dtype: str = "float32"
    eval_lengths: tuple[int, ...] = (256, 1024, 2048)
    windows: int = 8
    checkpoint_every: int = 20


def train(job: Job, report: Callable[[Report], None]) -> list[HeldOut]:
    """Run or resume `job`; the held-out figures stand in the card, too.

    Writes `out/model` (a checkpoint for transformers) and, with `adapter_rank`, `out/adapter`.
    Raises `DataError` when the output folder holds another run or cannot be written, or text is
    missing or too short, and `ModelLoadError` for the base model; all of it before training begins.
    """
    texts, held_out = _texts(job.train_files), _texts(job.valid_files)
    loaded = load_model(job.model, device=job.device, dtype=job.dtype)
    teacher: Any = loaded.model
    bound = bind(teacher)
    start = None if job.start is None else Adapter.read(job.start)
    corpus = Corpus(texts, loaded.tokenizer, job.recipe.seed)
    material = Material(corpus, job.recipe, _requests(job, loaded))
    valid = Corpus(held_out, loaded.tokenizer, seed=0)
    check_held_out(valid.ids, job.eval_lengths)
    with claimed(job.out, LEAST_ROOM):
        _check_unfinished(job.out)
        conversion = Conversion(
            teacher,
            material,
            job.recipe,
            job.out,
            base_digest=loaded.fingerprint,
            start=start,
            checkpoint_every=job.checkpoint_every,
        )
        for step in conversion:
            report(step)
        return _finish(job, loaded, conversion, valid, bound)


def _finish(
    job: Job,
    loaded: LoadedModel,
    conversion: Conversion,
    valid: Corpus,
    bound: dict[str, BaseTensor],
) -> list[HeldOut]:
    student = conversion.student
    held_out = evaluate(loaded.model, student.model, valid.ids, job.eval_lengths, job.windows)
    card = Card(
        base=loaded.model_id,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        recipe=job.recipe,
        tokens=conversion.tokens,
        seconds=conversion.seconds,
        threads=torch.get_num_threads(),
        held_out=held_out,
        bound=bound,
        requests=conversion.material.requests,
        too_long=conversion.material.too_long,
        before=None if conversion.start is None else conversion.start.history,
    )
    _check_unfinished(job.out)
    if student.rank is not None:
        save_adapter(student, card, job.out / ADAPTER)
    save_checkpoint(student.merge(), loaded.tokenizer, card, job.out / MERGED)
    (job.out / CHECKPOINT).unlink(missing_ok=True)
    return held_out


def _check_unfinished(out: Path) -> None:
    """`DataError` where a result lies. An adapter beside a checkpoint is no result yet."""
    check_free(out / MERGED)
    if not (out / CHECKPOINT).exists():
        check_free(out / ADAPTER)


def _texts(files: Sequence[Path]) -> list[str]:
    texts = read_texts(files)
    if not texts:
        raise DataError(f"no text in {', '.join(map(str, files)) or 'no file'}")
    return texts


def _requests(job: Job, loaded: LoadedModel) -> Requests | None:
    if not job.requests:
        return None
    embeddings: Any = loaded.model.get_input_embeddings()
    return Requests(
        job.requests,
        loaded.tokenizer,
        vocabulary=embeddings.num_embeddings,
        longest=job.recipe.longest_request,
        seed=job.recipe.seed,
    )
