"""Records for the tests of reports: whatever a book may hold, made up."""

from __future__ import annotations

import math
from random import Random

from tunebook._base.config_codec import encode, fingerprint_of
from tunebook._base.record_format import Body, Head, Record
from tunebook._base.vocabulary import Failure, Measurement, Problem

CALL = '{"a":{"$array":["numpy","float32",[%d,64],"C","cpu"]}}'
SPACE = [{"block": b, "stages": s, "order": o} for b in (16, 32, 64) for s in (1, 2, 3) for o in ("ij", "ji")]


def time_of(config, scale=1e-4):
    """`block` decides nearly everything, `order` a little, and nothing else anything."""
    block = config["block"]
    return scale * (64 / block if isinstance(block, int) else 1.0) * (1.1 if config.get("order") == "ij" else 1.0)


def measurement(config, samples_s=(), failure=None, **facts):
    encoded = encode(config)
    given = {"code": "code", "policy": "policy", "environment": "here", "when": 1000.0, **facts}
    return Measurement(encoded, fingerprint_of(encoded), samples_s=samples_s, failure=failure, **given)


def record(
    op="matmul@v0",
    device="cpu:x",
    size=64,
    space=SPACE,
    *,
    default=SPACE[0],
    failing=(),
    message="too large\nfor this device",
    kind="compile",
    **facts,
):
    rng = Random(size)
    measured = []
    for at, config in enumerate(space):
        when = 1000.0 + at
        if config in failing:
            failure = Failure(kind, message, when + 1e6)
            measured.append(measurement(config, failure=failure, when=when, compile_s=0.5))
            continue
        samples = tuple(time_of(config) * rng.lognormvariate(0, 0.01) for _ in range(12))
        dropped = time_of(config) > 1.5 * min(map(time_of, space))
        measured.append(measurement(config, samples, when=when, dropped=dropped, compile_s=0.5))
    working = [m for m in measured if m.failure is None]
    winner = min(working, key=lambda m: math.fsum(m.samples_s), default=None)
    provenance = {"when": 1100.0, "seconds": 102.0, "waiting_s": 30.0, "complete": True, "rule": "fastest", **facts}
    if default is not None:
        provenance["default"] = fingerprint_of(encode(default))
    if winner is not None:
        provenance["winner"] = winner.fingerprint
    config = None if winner is None else winner.config
    head = Head(
        problem=Problem(device, op, CALL % size), config=config, checksum="", origin="tuned", environment="here"
    )
    return Record(head, Body(measurements=tuple(measured), provenance=provenance))
