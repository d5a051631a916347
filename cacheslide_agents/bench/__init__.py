"""The benchmark: agent turns in, one JSON of paired measurements out.

    backend = load_backend("torch", model="smollm2-135m")
    results = run_task("reflexion", data="DIR", backend=backend, limit=8, out="results.json")
    print(markdown(results))

`run_task(task, *, data, backend, policies, limit, seed, max_prompt_tokens, repeats, answers,
out, resume, backend_name, progress) -> Results` measures every policy on every row of one workload
(`TASKS`) and rewrites `out` after each row. `run_study(name, *, data, backend, out, ...) -> dict`
does the same for one of `STUDIES`. `read_results(path)` validates a file of either run's schema.
`table(results)` is a rich table, `markdown(results)` a page, `plot_frontier(study, path)` a figure.
`progress(done, total, label)` is called after every row or point; the default does nothing.
"""

from cacheslide_agents.bench.plots import plot_frontier
from cacheslide_agents.bench.report import markdown, table
from cacheslide_agents.bench.results import Results, read_results
from cacheslide_agents.bench.runner import run_task
from cacheslide_agents.bench.studies import STUDIES, run_study
from cacheslide_agents.bench.workloads import TASKS, load_turns

__all__ = [
    "STUDIES",
    "TASKS",
    "Results",
    "load_turns",
    "markdown",
    "plot_frontier",
    "read_results",
    "run_study",
    "run_task",
    "table",
]
