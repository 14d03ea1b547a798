"""Counting for services: exact, from every thread, in the formats that collectors read, and free when it is off."""

from __future__ import annotations

import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import HANG_S

import tunebook as tb
from tunebook._report import metrics
from tunebook._report.metrics import Counts
from tunebook._selection.listeners import EVERYWHERE


@pytest.fixture(autouse=True)
def _counting():
    metrics.reset()
    metrics.on()
    yield
    metrics.off()
    metrics.reset()


def kernel(name="scale", **options):
    options = {"space": [{"step": 1}, {"step": 2}], "heuristic": {"step": 1}, "store": False, **options}

    @tb.tunable(name=name, **options)
    def scale(n, *, config):
        if config.step < 0:
            raise ValueError("a step is positive")
        return n

    return scale


def counted(family, kernel_name="scale"):
    found = metrics.counts()[f"tunebook_{family}"]
    by_label = {labels[2] if len(labels) > 2 else "": count for labels, count in found.items()}
    return by_label if all(labels[0].startswith(kernel_name) for labels in found) else found


def test_a_first_call_is_a_miss_that_tunes_and_later_ones_are_hits():
    scale = kernel()
    for _ in range(5):
        scale(7)
    assert counted("misses") == {"autotune": 1}
    assert counted("hits") == {"memory": 4}
    assert counted("tunings") == {"decided": 1}
    assert counted("tunings_running") == {"": 0}
    assert 0 < counted("tuning_seconds")[""] < HANG_S


def test_an_explicit_tuning_does_not_count_as_a_miss():
    scale = kernel()
    tb.tune(scale, 7)
    tb.verify(scale, 7)
    scale(7)
    assert counted("misses") == {}
    assert counted("tunings") == {"decided": 2}
    assert counted("hits") == {"memory": 1}


def test_an_answer_from_the_book_counts_as_a_persistent_hit(tmp_path):
    kernel(store=tmp_path)(7)
    metrics.reset()
    kernel(store=tmp_path)(7)
    assert counted("hits") == {"persistent": 1}
    assert counted("misses") == {}


def test_failed_candidates_are_counted_by_kind_and_a_failed_tuning_as_one():
    bad = [{"step": -1}, {"step": -2}]
    kernel(space=[*bad, {"step": 1}], check=False)(7)
    assert counted("candidate_failures") == {"launch": 2}
    metrics.reset()
    with pytest.raises(tb.TuningFailed, match="all 2 candidates failed"):
        tb.tune(kernel(space=bad, heuristic=None), 7)
    assert counted("tunings") == {"failed": 1}
    assert counted("tunings_running") == {"": 0}
    metrics.reset()
    with pytest.raises(tb.NoConfig, match="no configuration"):
        kernel(space=bad, heuristic=None)(7)
    assert counted("misses") == {"none": 1}


def test_a_background_tuning_is_counted_and_its_call_is_a_miss_answered_by_the_heuristic():
    scale = kernel(policy=tb.AutotunePolicy(cache_miss_fallback="background"))
    scale(7)
    tb.wait_for_background()
    scale(7)
    assert counted("misses") == {"heuristic": 1}
    assert counted("tunings") == {"decided": 1}
    assert counted("hits") == {"memory": 1}


def test_configurations_that_are_given_are_neither_hits_nor_misses():
    scale = kernel()
    scale(7, config={"step": 2})
    with scale.overlay(step=2):
        scale(7)
    assert counted("overrides") == {"override": 1, "overlay": 1}
    assert counted("hits") == counted("misses") == {}


def test_hits_of_many_threads_are_counted_exactly():
    scale = kernel()
    scale(7)
    metrics.reset()
    start = threading.Barrier(8)

    def calls(seed):
        rng = Random(seed)
        start.wait()
        for _ in range(2000):
            scale(rng.choice([7, 7, 7]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(calls, range(8)))
    assert counted("hits") == {"memory": 16000}


def test_off_the_hot_path_answers_by_itself_again():
    scale = kernel()
    scale(7)
    metrics.off()
    assert scale.selector.listeners == []
    assert EVERYWHERE.listeners == []
    for _ in range(3):
        scale(7)
    assert counted("hits") == {}


def test_on_twice_counts_once():
    metrics.on()
    scale = kernel()
    scale(7)
    scale(7)
    assert counted("hits") == {"memory": 1}


@given(st.text(min_size=1), st.text(), st.sampled_from(["memory", "persistent"]), st.integers(1, 5))
def test_any_name_reads_back_from_the_text(name, device, level, times):
    parser = pytest.importorskip("prometheus_client.parser")
    counts = Counts()
    for _ in range(times):
        counts.hear("cache_hit", op_id=name, device=device, call_key="k", cfg=None, level=level)
    (sample,) = (s for family in parser.text_string_to_metric_families(counts.text()) for s in family.samples)
    expected = {"kernel": name, "device": device, "level": level}
    assert (sample.name, sample.labels, sample.value) == ("tunebook_hits_total", expected, times)


def test_prometheus_can_parse_the_text():
    parser = pytest.importorskip("prometheus_client.parser")
    scale = kernel()
    for _ in range(3):
        scale(7)
    families = {f.name: f for f in parser.text_string_to_metric_families(metrics.text())}
    assert set(families) == {family.name for family in metrics.FAMILIES}
    assert {f.type for f in families.values()} == {"counter", "gauge"}
    assert [s.value for s in families["tunebook_hits"].samples] == [2]
    assert all(f.documentation for f in families.values())


def test_a_server_answers_with_the_text_until_it_is_closed():
    scale = kernel()
    scale(7)
    with metrics.serve(0) as server:
        assert server.url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(server.url) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert answer.read().decode() == metrics.text()
        port = int(server.url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(tb.DefinitionError, match="another port, or 0"):
            metrics.serve(port)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(server.url)


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "tunebook.prom"
    metrics.write(path)
    kernel()(7)
    assert metrics.write(path) == path
    assert 'answer="autotune"} 1' in path.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["tunebook.prom"]


def test_opentelemetry_gets_the_counts_and_a_span_for_each_tuning():
    sdk_metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    reader, spans, tracers = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    metrics.opentelemetry(sdk_metrics.MeterProvider([reader]), tracers)
    try:
        scale = kernel(space=[{"step": -1}, {"step": 1}, {"step": 2}], check=False)
        scale(7)
        scale(7)
        (resource,) = reader.get_metrics_data().resource_metrics
        found = {m.name: m.data.data_points for scope in resource.scope_metrics for m in scope.metrics}
        (hits,) = found["tunebook.hits"]
        assert (hits.value, hits.attributes["level"]) == (1, "memory")
        assert [point.value for point in found["tunebook.tunings"]] == [1]
        (span,) = spans.get_finished_spans()
        assert span.name == "tunebook.tune"
        assert span.attributes["tunebook.kernel"].startswith("scale")
        assert [event.attributes["kind"] for event in span.events] == ["launch"]
    finally:
        metrics._counts._watchers = ()
