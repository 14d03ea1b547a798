"""Other tools' files: real ones where there are some, round trips, and clear errors for broken ones."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tunebook as tb
from tunebook import formats
from tunebook._base.config_codec import decode, encode
from tunebook._base.record_format import merge
from tunebook.formats import FORMATS
from tunebook.stores import MemoryStore

HERE = Path(__file__).parents[1]
FILES = HERE / "formats" / "files"  # small files in each tool's own form


def same(one, two):
    """Whether records say the same: times pass through milliseconds and back, so not to the last bit."""
    assert [r.problem for r in one] == [r.problem for r in two]
    for left, right in zip(one, two, strict=True):
        assert left.head == right.head
        assert [m.config for m in left.body.measurements] == [m.config for m in right.body.measurements]
        for before, after in zip(left.body.measurements, right.body.measurements, strict=True):
            assert after.samples_s == pytest.approx(before.samples_s)
            assert after.failure == before.failure
            assert after.compile_s == pytest.approx(before.compile_s)
            assert after.when == pytest.approx(before.when)
    return True


SAMPLES = {
    "ejkernel": FILES / "ejkernel.json",
    "kernel_tuner": FILES / "kernel_tuner.json",
    "t4": FILES / "t4.json",
    "tokamax": FILES / "tokamax",
    "triton": FILES / "matmul_kernel.autotune.json",
    "vllm": FILES / "vllm",
}


def test_every_format_is_in_the_table_and_has_a_sample_here():
    modules = {path.stem[1:] for path in Path(formats.__file__).parent.glob("_[a-z]*.py")} - {"bundle", "format"}
    assert SAMPLES.keys() == FORMATS.keys() == modules


class TestEveryFormat:
    @pytest.mark.parametrize("name", FORMATS)
    def test_records_are_written_and_read_again(self, name, tmp_path):
        records = formats.read(name, SAMPLES[name])
        assert records
        target = tmp_path / SAMPLES[name].name
        assert formats.write(name, records, target) >= 1
        assert same(records, formats.read(name, target))

    @pytest.mark.parametrize("name", FORMATS)
    def test_it_is_written_as_the_tool_wrote_it(self, name, tmp_path):
        target = tmp_path / SAMPLES[name].name
        formats.write(name, formats.read(name, SAMPLES[name]), target)
        for file in [SAMPLES[name]] if SAMPLES[name].is_file() else sorted(SAMPLES[name].rglob("*.json")):
            written = target if SAMPLES[name].is_file() else target / file.relative_to(SAMPLES[name])
            assert _leaves(json.loads(file.read_text())) <= _leaves(json.loads(written.read_text()))

    @pytest.mark.parametrize("name", FORMATS)
    def test_records_go_into_a_book_and_are_the_same_there(self, name, tmp_path):
        store = MemoryStore()
        records = formats.read(name, SAMPLES[name])
        store.put_many(records)
        assert {r.problem for r in store.items()} == {r.problem for r in records}
        assert all(r.head.origin == "imported" for r in records)

    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("content", ["", "[1, 2]", "{", '{"a": 1}', '{"a|b|c": null}', "\x00\x01", '{"cache": {}}'])
    def test_another_file_is_a_clear_error(self, name, content, tmp_path):
        path = tmp_path / "E=8,N=16,device_name=X.json"
        path.write_text(content)
        with pytest.raises(tb.CodecError, match=str(path.name)):
            formats.read(name, path)

    @pytest.mark.parametrize("name", FORMATS)
    def test_a_missing_file_is_named(self, name, tmp_path):
        with pytest.raises(tb.StoreError, match="cannot read"):
            formats.read(name, tmp_path / "E=8,N=16,device_name=X.json")

    @pytest.mark.parametrize("name", FORMATS)
    def test_the_user_names_the_operation_and_the_device(self, name):
        records = formats.read(name, SAMPLES[name], op="mine@v2", device="gpu:here")
        assert {(r.problem.op, r.problem.device) for r in records} == {("mine@v2", "gpu:here")}

    @pytest.mark.parametrize("name", FORMATS)
    @given(cut=st.integers(1, 4000))
    def test_a_file_that_was_cut_short_is_an_error_or_a_shorter_table(self, name, cut, tmp_path_factory):
        sample = SAMPLES[name] if SAMPLES[name].is_file() else next(SAMPLES[name].rglob("*.json"))
        path = tmp_path_factory.mktemp("cut") / sample.name
        text = sample.read_text()
        path.write_text(text[: max(0, len(text.rstrip()) - cut)])
        if name == "kernel_tuner":  # it appends, and so leaves files without their end
            with suppress(tb.CodecError):
                assert len(formats.read(name, path)) == 1
        else:
            with pytest.raises(tb.CodecError, match=re.escape(path.name)):
                formats.read(name, path)

    @pytest.mark.parametrize("name", sorted(set(FORMATS) - {"ejkernel"}))
    def test_a_broken_file_in_a_directory_costs_a_warning_and_not_the_others(self, name, tmp_path):
        if SAMPLES[name].is_dir():
            shutil.copytree(SAMPLES[name], tmp_path / "all")
        else:
            (tmp_path / "all").mkdir()
            shutil.copy(SAMPLES[name], tmp_path / "all")
        good = next((tmp_path / "all").rglob("*.json"))
        good.with_name(f"E=9,N=9,device_name=X.{good.name.split('.', 1)[1]}").write_text("{")
        (tmp_path / "all" / f"empty.{good.name.split('.', 1)[1]}").touch()
        with pytest.warns(tb.TunebookWarning, match="E=9,N=9"):
            records = formats.read(name, tmp_path / "all")
        assert len(records) == len(formats.read(name, SAMPLES[name]))

    def test_a_directory_without_matching_files_is_an_error_that_names_the_pattern(self, tmp_path):
        with pytest.raises(tb.CodecError, match=r"has no E=\*\.json in it"):
            formats.read("vllm", tmp_path)

    def test_an_unknown_format_is_an_error_that_lists_the_formats(self, tmp_path):
        with pytest.raises(tb.DefinitionError, match="unknown format 'csv'; known are ejkernel, kernel_tuner"):
            formats.read("csv", tmp_path)


def _leaves(value, path=()):
    """Return every value of a file with its place; texts that are JSON are opened, numbers rounded."""
    if isinstance(value, dict):
        return {leaf for name, item in value.items() for leaf in _leaves(item, (*path, _text(name)))}
    if isinstance(value, list):
        return {leaf for i, item in enumerate(value) for leaf in _leaves(item, (*path, i))}
    return {(*path, f"{value:.9g}" if isinstance(value, float) else value)}


def _text(name):
    return json.dumps(json.loads(name), sort_keys=True) if name.startswith("{") else name


class TestKernelTuner:
    RECORDED = sorted((HERE.parent.parent / "shared" / "data" / "spaces").glob("*.json.gz"))

    def test_samples_of_amd_cards_are_pairs(self, tmp_path):
        text = SAMPLES["kernel_tuner"].read_text()
        (tmp_path / "amd.json").write_text(text.replace("[1.625, 1.375]", "[[0, 1.625], [0, 1.375]]"))
        assert "[[0," in (tmp_path / "amd.json").read_text()
        assert same(formats.read("kernel_tuner", SAMPLES["kernel_tuner"]), formats.read("kernel_tuner", tmp_path))

    def test_failures_have_their_kind(self):
        (record,) = formats.read("kernel_tuner", SAMPLES["kernel_tuner"])
        kinds = {m.failure.kind: m.failure.message for m in record.body.measurements if m.failure}
        assert kinds == {"compile": "CompilationFailedConfig", "launch": "RuntimeFailedConfig"}
        assert all(s < 1 for m in record.body.measurements for s in m.samples_s)

    @pytest.mark.parametrize("end", ["", ",", ",\n", "}", "}\n", "}\n}"])
    def test_an_interrupted_run_is_read(self, tmp_path, end):
        whole = SAMPLES["kernel_tuner"].read_text().rstrip()
        (tmp_path / "cut.json").write_text(whole.removesuffix("}").rstrip().removesuffix("}").rstrip() + end)
        assert len(formats.read("kernel_tuner", tmp_path / "cut.json")[0].body.measurements) == 5

    def test_a_tuning_starts_from_an_imported_space(self):
        (record,) = formats.read("kernel_tuner", SAMPLES["kernel_tuner"])
        assert decode(record.head.config)["block_size_x"] == 32

    @pytest.mark.skipif(not RECORDED, reason="the recorded spaces are not beside this checkout")
    def test_a_recorded_space_of_eleven_thousand_keeps_its_fastest(self, tmp_path):
        path = tmp_path / "space.json"
        path.write_bytes(gzip.decompress(self.RECORDED[-1].read_bytes()))
        (record,) = formats.read("kernel_tuner", path)
        assert len(record.body.measurements) == 2000
        best = min(min(m.samples_s) for m in record.body.measurements if m.samples_s)
        fastest = min(e["time"] for e in json.loads(path.read_text())["cache"].values() if isinstance(e["time"], float))
        assert best * 1e3 <= fastest
        assert formats.write("kernel_tuner", [record], tmp_path / "again.json") == 1
        assert same([record], formats.read("kernel_tuner", tmp_path / "again.json"))

    @pytest.mark.skipif(importlib.util.find_spec("kernel_tuner") is None, reason="kernel_tuner is not installed")
    def test_the_tool_itself_reads_our_files(self, tmp_path):
        from kernel_tuner.util import read_cache

        formats.write("kernel_tuner", formats.read("kernel_tuner", SAMPLES["kernel_tuner"]), tmp_path / "c.json")
        assert len(read_cache(tmp_path / "c.json", open_cache=False)["cache"]) == 5


class TestTriton:
    def test_a_configuration_is_written_as_the_adapter_writes_it(self):
        triton = pytest.importorskip("triton")
        from tunebook.adapters._triton.candidate import LaunchConfig

        (record,) = formats.read("triton", SAMPLES["triton"])
        live = triton.Config({"BLOCK_M": 64, "BLOCK_N": 64}, num_warps=4, num_stages=3)
        assert encode(LaunchConfig(live)) in [m.config for m in record.body.measurements]

    def test_a_configuration_that_did_not_run_there_is_a_failure_and_not_a_time(self):
        (record,) = formats.read("triton", SAMPLES["triton"])
        failed = [m for m in record.body.measurements if m.failure]
        assert len(failed) == 1
        assert all(math.isfinite(s) for m in record.body.measurements for s in m.samples_s)

    def test_a_file_written_by_triton_itself_is_read(self, tmp_path):
        pytest.importorskip("triton")
        environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, str(HERE / "triton_autotune_cache.py")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (record,) = formats.read("triton", tmp_path)
        assert record.problem.op == "scale@v0"
        assert decode(record.head.config)["BLOCK"] == 64


class TestTokamax:
    def test_the_tables_that_it_ships_are_read_and_written(self, tmp_path):
        found = importlib.util.find_spec("tokamax")
        if found is None:
            pytest.skip("tokamax is not installed; it needs Python 3.12")
        tables = Path(found.origin).parent / "data" / "autotuning"
        with pytest.warns(tb.TunebookWarning, match="ragged_dot.json"):  # of 0.0.12, one is not JSON
            records = formats.read("tokamax", tables)
        formats.write("tokamax", records, tmp_path)
        assert same(
            sorted(records, key=lambda r: r.problem), sorted(formats.read("tokamax", tmp_path), key=lambda r: r.problem)
        )

    def test_the_fastest_is_the_choice_and_the_key_is_spelt_out(self):
        record = formats.read("tokamax", SAMPLES["tokamax"])[0]
        fastest = min(record.body.measurements, key=lambda m: min(m.samples_s))
        assert record.head.config == fastest.config
        assert json.loads(record.problem.call_key)["x"] == "bf16[384,64]"


class TestVllm:
    def test_the_name_of_the_file_is_part_of_the_key(self):
        records = formats.read("vllm", SAMPLES["vllm"])
        keys = [json.loads(r.problem.call_key) for r in records]
        assert {"E": 8, "M": 64, "N": 14336, "block_shape": "[128,128]", "dtype": "fp8_w8a8"} in keys
        assert {r.problem.device for r in records} == {"gpu:NVIDIA H200"}

    def test_a_record_with_another_key_is_refused(self, tmp_path):
        records = formats.read("tokamax", SAMPLES["tokamax"])
        with pytest.raises(tb.CodecError, match="keys of E, N, M, dtype and block_shape"):
            formats.write("vllm", records, tmp_path)


class TestT4:
    def test_kernel_tuners_own_results_are_read_by_the_unit_that_they_name(self):
        (record,) = formats.read("t4", SAMPLES["t4"])
        assert min(s for m in record.body.measurements for s in m.samples_s) == pytest.approx(1.5e-3)
        assert {m.failure.kind for m in record.body.measurements if m.failure} == {"compile", "wrong-result"}

    def test_our_files_have_every_field_that_the_schema_requires(self, tmp_path):
        formats.write("t4", formats.read("kernel_tuner", SAMPLES["kernel_tuner"]), tmp_path / "out.json")
        for result in json.loads((tmp_path / "out.json").read_text())["results"]:
            assert {"configuration", "times", "invalidity", "correctness"} <= result.keys()
            assert result["invalidity"] in {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}


def test_a_tuned_kernel_goes_out_and_comes_back(tmp_path):
    @tb.tunable(space=tb.Space(block=[1, 2]), heuristic=lambda n: {"block": 1})
    def spender(n, *, config):
        return n

    tb.tune(spender, 8)
    store = spender.selector.persistent.store
    (record,) = store.items(spender.kernel.op_id_v)
    formats.write("t4", [record], tmp_path / "spender.json")
    (back,) = formats.read("t4", tmp_path / "spender.json")
    assert back.problem == record.problem
    assert merge(record, back).head.config == record.head.config
    assert {m.fingerprint for m in back.body.measurements} == {m.fingerprint for m in record.body.measurements}


def test_an_imported_choice_answers_a_call_with_its_key(tmp_path):
    @tb.tunable(space=tb.Space(block=[1, 2]), heuristic=lambda n: {"block": 1})
    def spender(n, *, config):
        return config.block

    problem = spender.explain(8).problem
    (tmp_path / "cache.json").write_text(json.dumps({"|".join(problem): {"block": 2}}))
    spender.selector.persistent.store.put_many(formats.read("ejkernel", tmp_path / "cache.json"))
    assert spender(8) == 2
