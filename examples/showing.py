"""What the examples print."""

from __future__ import annotations

import tunebook as tb

MINUTE_S = 60  # for all calls of an example together, also on a busy machine


def tune_and_show(function, calls, default):
    """Tune calls of a function, and print how far apart its configurations are and why one was chosen.

    `calls` maps a title to the arguments of a call; `default` is what they would get without tuning.
    """
    wide = max(map(len, calls))
    print(f"{'':{wide}}  {'best':>8}  {'default':>16}  {'worst':>16}")
    for title, arguments in calls.items():
        tuned = tb.tune(function, *arguments, budget=MINUTE_S / len(calls))
        times = times_of(tuned)
        print(f"{title:{wide}}  {summary(times[spelled(tuned.config)], times[spelled(default)], max(times.values()))}")
        print(f"    {spelled(tuned.config)}")
    title, arguments = next(iter(calls.items()))
    print(f"\nWhy, for {title}?\n\n{function.explain(*arguments)}\n")
    chosen = spelled(function.config_for(*arguments))
    print(f"From now on, {function.__name__}(...) runs with {chosen} for this, in other processes too.")


def times_of(tuned):
    """Return the time of every configuration that was measured, the fastest first."""
    # By time alone: a ranking puts the candidates that left the race early last.
    return {spelled(config): seconds for config, seconds in sorted(tuned.ranking, key=lambda ranked: ranked[1])}


def summary(best_s, *others_s):
    """Return times, those after the first with how many times the first they are."""
    return "  ".join([f"{duration(best_s):>8}", *(f"{duration(t):>8} {ratio(t / best_s):>7}" for t in others_s)])


def call_time(function, arguments):
    """Return the time of the fastest of a few calls."""
    return duration(tb.Tuner(iters=10).measure(function, *arguments))


def spelled(config):
    """Return a configuration as `ROWS=8 PACK=True`."""
    return " ".join(f"{name}={_words(value)}" for name, value in config.items())


def _words(value):
    return ",".join(map(_words, value)) if isinstance(value, (tuple, list)) else str(value)


def duration(seconds):
    """Return a time in the unit that suits it."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def ratio(factor):
    """Return a ratio as `3.5 x`, in three digits."""
    return f"{factor:.3g} x" if factor < 1000 else f"{factor:.0f} x"
