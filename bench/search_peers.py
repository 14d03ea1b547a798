"""Peers on the recorded spaces: Kernel Tuner's strategies in its simulation mode, and Optuna's TPE.

Each runs until the clock of the records says that its budget is spent; its proposals are then costed as ours are.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import random
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from search_spaces import Clock, Recorded, Run, read

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

KERNEL_TUNER = ("simulated_annealing", "pso", "genetic_algorithm", "greedy_ils")
# Optuna takes longer over a proposal than many kernels take to compile: only where random search needs few.
OPTUNA_EVALUATIONS = 400
_TRIES = 20  # proposals outside the space are refused for nothing; so many for each that is inside


def _costed(recorded: Recorded, rows: Iterable[int], asked: int, thinking_s: float) -> Run:
    unique = list(dict.fromkeys(rows))
    return Run(unique, np.cumsum(recorded.cost_s[unique]).tolist(), asked, thinking_s)


def plain_file(path: Path, folder: Path) -> Path:
    """Unpack a cache file, because Kernel Tuner reads plain ones."""
    plain = folder / path.name.removesuffix(".gz")
    if not plain.exists():
        plain.write_bytes(gzip.decompress(path.read_bytes()))
    return plain


@functools.cache
def _header(plain: Path) -> dict[str, Any]:
    return {name: value for name, value in read(plain).items() if name != "cache"}


def kernel_tuner_run(recorded: Recorded, clock: Clock, plain: Path, strategy: str, seed: int) -> Run:
    import kernel_tuner  # noqa: PLC0415 - a peer
    from constraint import FunctionConstraint  # noqa: PLC0415 - as above

    document = _header(plain)
    names = document["tune_params_keys"]
    valid = {tuple(config[name] for name in names) for config in recorded.configs}
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what Kernel Tuner draws from
    began = time.perf_counter()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        results, _ = kernel_tuner.tune_kernel(
            document["kernel_name"],
            "",
            document["problem_size"],
            [],
            {name: document["tune_params"][name] for name in names},
            restrictions=[FunctionConstraint(lambda *values: values in valid)],
            cache=str(plain),
            simulation_mode=True,
            strategy=strategy,
            strategy_options={"time_limit": clock.budget_s},
            quiet=True,
        )
    by_values = {tuple(config[name] for name in names): row for config, row in recorded.row.items()}
    rows = (by_values[tuple(result[name] for name in names)] for result in results)
    return _costed(recorded, rows, len(results), time.perf_counter() - began)


def optuna_run(recorded: Recorded, clock: Clock, seed: int) -> Run:
    import optuna  # noqa: PLC0415 - a peer

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    axes = {name: values for name, values in recorded.space.axes.items() if len(values) > 1}
    fixed = {name: values[0] for name, values in recorded.space.axes.items() if len(values) == 1}
    rows: list[int] = []
    seen: set[int] = set()
    spent_s, asked, began = 0.0, 0, time.perf_counter()
    most = _TRIES * int(clock.budget_s / np.median(recorded.cost_s) + 10)
    while spent_s < clock.budget_s and asked < most:
        trial = study.ask()
        asked += 1
        config = {**fixed, **{name: trial.suggest_categorical(name, values) for name, values in axes.items()}}
        row = recorded.row.get(type(recorded.configs[0])(**config))
        value = np.nan if row is None else recorded.time_ms[row]
        if row is not None and row not in seen:
            seen.add(row)
            rows.append(row)
            spent_s += recorded.cost_s[row]
        if np.isfinite(value):
            study.tell(trial, float(np.log(value)))
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return _costed(recorded, rows, asked, time.perf_counter() - began)


def is_small(recorded: Recorded, clock: Clock) -> bool:
    """Whether Optuna can be asked in a sensible time."""
    return clock.budget_s / float(np.median(recorded.cost_s)) <= OPTUNA_EVALUATIONS
