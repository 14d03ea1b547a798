"""Other tools' files: real ones where there are some, round trips, and clear errors for broken ones."""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import FakeClock, fake_tuner

import tunebook as tb
from tunebook import formats
from tunebook._base.config_codec import decode, encode
from tunebook._base.record_format import Record, merge
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
    **{name: FILES / f"{name}.json" for name in ("ejkernel", "kernel_tuner", "t4")},
    "triton": FILES / "matmul_kernel.autotune.json",
    **{path.name: path for path in FILES.iterdir() if path.is_dir()},
}
CSV = ("aiter", "tunableop")


def files_of(path):
    return [path] if path.is_file() else sorted(file for file in path.rglob("*.*") if file.is_file())


def test_every_format_is_in_the_table_and_has_a_sample_here():
    modules = {path.stem[1:] for path in Path(formats.__file__).parent.glob("_[a-z]*.py")}
    assert SAMPLES.keys() == FORMATS.keys() == modules - {"bundle", "format", "key_map"}


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
        for file in files_of(SAMPLES[name]):
            written = target if SAMPLES[name].is_file() else target / file.relative_to(SAMPLES[name])
            if name in CSV:
                assert written.read_text() == file.read_text()
            else:
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
        sample = files_of(SAMPLES[name])[0]
        path = tmp_path_factory.mktemp("cut") / sample.name
        text = sample.read_text()
        path.write_text(text[: max(0, len(text.rstrip()) - cut)])
        if name in ("kernel_tuner", *CSV):  # Kernel Tuner appends, and a CSV file may end with any line
            with suppress(tb.CodecError):
                assert len(formats.read(name, path)) <= len(formats.read(name, sample))
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
        good = files_of(tmp_path / "all")[0]
        good.with_name(f"E=9,N=9,device_name=X.{good.name.split('.', 1)[1]}").write_text("{")
        (tmp_path / "all" / f"empty.{good.name.split('.', 1)[1]}").touch()
        with pytest.warns(tb.TunebookWarning, match="E=9,N=9"):
            records = formats.read(name, tmp_path / "all")
        assert len(records) == len(formats.read(name, SAMPLES[name]))

    def test_a_directory_without_matching_files_is_an_error_that_names_the_pattern(self, tmp_path):
        with pytest.raises(tb.CodecError, match=r"has no \*\.json in it"):
            formats.read("vllm", tmp_path)

    def test_an_unknown_format_is_an_error_that_lists_the_formats(self, tmp_path):
        with pytest.raises(tb.DefinitionError, match="unknown format 'csv'; known are aiter, aiter_triton, ejkernel"):
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
        found = {(r.problem.op, r.problem.device, r.problem.call_key) for r in records}
        h200, fp8 = "gpu:NVIDIA H200", {"block_shape": "[128,128]", "dtype": "fp8_w8a8"}
        assert found >= {
            ("fused_moe@v0", h200, _key(E=8, M=64, N=14336, **fp8)),
            ("fused_moe@v0", "gpu:AMD Instinct MI300X", _key(E=4, M=1, N=96, backend="flydsl", dtype="int4_w4a16")),
            ("w8a8_scaled_mm@v0", h200, _key(K=160, M=24, N=96, **fp8)),
            ("selective_state_update@v0", h200, _key(cache_dtype="float16", dstate=24, effective_batch=8, headdim=48)),
        }

    def test_the_suffixes_and_the_version_folders_of_sglang_are_read(self):
        records = formats.read("sglang", SAMPLES["sglang"])
        keys = {r.problem.call_key for r in records}
        assert _key(E=6, M=2, N=96, block_shape="[128, 128]", down=True, dtype="fp8_w8a8") in keys
        assert _key(E=6, M=48, N=96, dtype="fp8_w8a8", per_channel_quant=True) in keys
        assert _key(K=96, R=24, S=2, chunk_size=16) in keys
        assert {r.body.provenance.get("triton_version") for r in records} == {"3.5.1", None}

    def test_the_tables_of_sglang_with_facts_beside_the_rows_are_read(self):
        found = {(r.problem.op, r.problem.call_key): r for r in formats.read("sglang", SAMPLES["sglang"])}
        gemm = _key(E=6, K=160, M=24, N1=96, N2=48, provider="cutedsl_fp8_masked")
        assert decode(found["lora_base_gemm@v0", gemm].head.config) == {"token_width": 32}
        scatter = _key(H=96, collective="reduce_scatter", tokens=24, world=3)
        assert decode(found["sp_collective@v0", scatter].head.config) == {"strategy": "pull"}
        assert decode(found["moe_front_strategy@v0", _key(E=6, tokens=736, topk=3)].head.config) == "overlap"
        assert found["sp_collective@v0", scatter].body.provenance["beside"]["source"]["nodes"] == 1

    def test_a_table_with_sections_is_written_from_entries_without_the_facts(self, tmp_path):
        records = [
            Record(replace(r.head, origin="tuned"), replace(r.body, provenance={}))
            for r in formats.read("sglang", SAMPLES["sglang"] / "world=3,H=96,device_name=NVIDIA_GB300.json")
        ]
        formats.write("sglang", records, tmp_path)
        written = json.loads((tmp_path / "world=3,H=96,device_name=NVIDIA_GB300.json").read_text())
        assert {name: list(rows) for name, rows in written["configs"].items()} == {
            "all_gather": ["6"],
            "reduce_scatter": ["6", "24"],
        }

    @pytest.mark.parametrize(
        ("name", "text", "found"),
        [
            ("world=3,H=96", '{"source": {}}', "'configs', a table of configurations, is missing"),
            ("world=3,H=96", '{"configs": {"all_gather": 3}}', "'all_gather' is not a table of configurations"),
            ("world=3,H=96", '{"configs": {"all_gather": {"x": {}}}}', "'x' is not a number with its configuration"),
            ("strategy,E=6,topk=3", '{"configs": {"736": {"a": 1}}}', "'736' is not a number with its configuration"),
            ("epilogue,E=6,topk=3", '{"configs": {"736": "a"}}', "'736' is not a number with its configuration"),
        ],
    )
    def test_a_table_with_sections_of_another_form_is_refused_with_the_part(self, name, text, found, tmp_path):
        file = tmp_path / f"{name},device_name=X.json"
        file.write_text(text)
        with pytest.raises(tb.CodecError, match=re.escape(found)):
            formats.read("sglang", file)

    @given(
        sizes=st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)),
        device=st.text("ABCxyz019()-_", max_size=12),
        dtype=st.sampled_from([None, "fp8_w8a8", "int4_w4a16", "fp8_w8a8_channelwise"]),
        last=st.sampled_from(["", ",block_shape=[128,64]", ",per_channel_quant=True", "_down"]),
        names=st.sampled_from([("E", "N"), ("N", "K")]),
        rows=st.dictionaries(st.integers(0, 10**6).map(str), st.just({"BLOCK_SIZE_M": 16, "num_warps": 4}), min_size=1),
        version=st.sampled_from(["", "triton_3_5_1/"]),
    )
    def test_every_name_of_its_form_makes_the_round_trip(
        self, sizes, device, dtype, last, names, rows, version, tmp_path_factory
    ):
        parts = [f"{name}={size}" for name, size in zip(names, sizes, strict=True)]
        given_dtype = [f"dtype={dtype}"] if dtype else []
        name = ",".join([*parts, f"device_name={device}", *given_dtype]) + last + ".json"
        form = "sglang" if version else "vllm"
        name = name.replace("[128,64]", "[128, 64]") if version else name  # as each tool's loader spells it
        place = tmp_path_factory.mktemp("table")
        (place / "a" / version).mkdir(parents=True)
        (place / "a" / version / name).write_text(json.dumps(rows))
        if names == ("N", "K") and "quant" in last:
            with pytest.raises(tb.CodecError, match=re.escape(name)):
                formats.read(form, place / "a" / version / name)
            return
        formats.write(form, formats.read(form, place / "a" / version / name), place / "b")
        assert json.loads((place / "b" / version / name).read_text()) == rows

    def test_a_size_without_a_configuration_is_an_entry_without_a_choice(self, tmp_path):
        file = tmp_path / "N=96,K=160,device_name=NVIDIA_L40S,dtype=fp8_w8a8_channelwise.json"
        file.write_text('{"1": {"BLOCK_M": 16}, "48": null}')
        records = formats.read("sglang", file)
        assert [r.head.decided for r in records] == [True, False]
        formats.write("sglang", records, tmp_path / "again")
        assert json.loads((tmp_path / "again" / file.name).read_text()) == json.loads(file.read_text())

    @pytest.mark.parametrize(
        "name",
        ["E=8,device_name=X.json", "N=1,E=8,device_name=X.json", "E=8,N=1,device_name=X,colour=red.json", "a=1.json"],
    )
    def test_a_name_of_another_form_is_refused_by_name(self, name, tmp_path):
        (tmp_path / name).write_text('{"1": {"BLOCK_M": 16}}')
        with pytest.raises(tb.CodecError, match=f"{name} is not a kernel table of vLLM: its name should be like"):
            formats.read("vllm", tmp_path / name)

    def test_tables_of_several_versions_at_once_say_that_a_book_keeps_one(self, tmp_path):
        for version in ("triton_3_4_0", "triton_3_5_1"):
            (tmp_path / version).mkdir()
            (tmp_path / version / "E=8,N=1,device_name=X.json").write_text('{"1": {"BLOCK_M": 16}}')
        with pytest.warns(tb.TunebookWarning, match=r"1 entries below .* have the same key as another"):
            formats.read("sglang", tmp_path)

    def test_a_record_with_another_key_is_refused_with_the_option_to_type(self, tmp_path):
        records = formats.read("tokamax", SAMPLES["tokamax"])
        with pytest.raises(tb.CodecError, match=r"has keys of E, N, dtype.*--map E=w1\.shape\[0\]"):
            formats.write("vllm", records, tmp_path)


def _key(**parts):
    return json.dumps(parts, sort_keys=True, separators=(",", ":"))


class TestTimesOfOthers:
    """Formats that keep the time of their choice: it is a measurement here, and written as it was."""

    @pytest.mark.parametrize(
        ("name", "op", "seconds"),
        [
            ("aiter", "small_tuned_gemm@v0", [12.5e-6, 20.25e-6]),
            ("fla", "scale_fwd_kernel@v0", [0.25e-3] * 2),
            ("tunableop", "GemmTunableOp_float_NT@v0", [0.125e-3]),
        ],
    )
    def test_the_time_of_the_choice_is_read(self, name, op, seconds):
        records = [r for r in formats.read(name, SAMPLES[name]) if r.problem.op == op]
        assert [s for r in records for m in r.body.measurements for s in m.samples_s] == pytest.approx(seconds)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("aiter", "M,kernelId,us\n1,2,{}\n"),
            (
                "fla",
                '{{"autotune_entries": [{{"autotune_key": [], "config": {{"kwargs": {{}}}}, "best_timing": "{}"}}]}}',
            ),
            ("tunableop", "Op,nn_1_2,Default,{}\n"),
        ],
    )
    @pytest.mark.parametrize("time", ["inf", "nan", "", "soon"])
    def test_a_time_that_is_not_one_is_an_error_that_names_the_file(self, name, text, time, tmp_path):
        (tmp_path / "t.txt").write_text(text.format(time))
        with pytest.raises(tb.CodecError, match=r"t\.txt is not a .*: "):
            formats.read(name, tmp_path / "t.txt")

    def test_a_list_of_shapes_is_not_a_table(self, tmp_path):
        (tmp_path / "untuned.csv").write_text("M,N,K\n1,2,3\n")
        with pytest.raises(tb.CodecError, match=r"untuned.csv .* has no times .* its columns are M, N, K"):
            formats.read("aiter", tmp_path / "untuned.csv")

    @given(
        rows=st.lists(
            st.tuples(
                st.integers(1, 9),
                st.floats(0.001, 1e6) | st.just("18.90") | st.just("1483.5 "),
                st.text("ab0 ,\"'.%", max_size=5),
            ),
            max_size=4,
        )
    )
    def test_every_csv_row_makes_the_round_trip(self, rows, tmp_path_factory):
        place = tmp_path_factory.mktemp("csv")
        with (place / "t.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["cu_num", "M", "note", "kernelId", "us", "tflops"])
            writer.writerows([80, i, text, kernel, us, ""] for i, (kernel, us, text) in enumerate(rows))
        formats.write("aiter", formats.read("aiter", place / "t.csv"), place / "b")
        if rows:
            assert (place / "b" / "t.csv").read_text() == (place / "t.csv").read_text()

    def test_an_entry_of_fla_is_found_by_its_digest_of_the_key(self, tmp_path):
        formats.write("fla", formats.read("fla", SAMPLES["fla"]), tmp_path)
        entries = json.loads((tmp_path / "NVIDIA_H200" / "scale_fwd_kernel.json").read_text())["autotune_entries"]
        text = '[96,true,"torch.float32"]'
        assert entries[hashlib.md5(text.encode()).hexdigest()]["config"]["kwargs"] == {"BT": 16}

    @pytest.mark.parametrize("entries", [[{"autotune_key": [1], "config": {"kwargs": {}}}], {}])
    def test_other_forms_of_fla_are_read(self, entries, tmp_path):
        (tmp_path / "k.json").write_text(
            json.dumps({"kwargs": {"BT": 16}, "num_warps": 4, "autotune_entries": entries})
        )
        assert [r.problem.call_key for r in formats.read("fla", tmp_path / "k.json")] == ["{}", '{"key":[1]}'][
            : 1 + len(entries)
        ]


SIZES = {"E": "w1.shape[0]", "N": "w2.shape[2]", "M": "x.shape[0]", "dtype": "'fp8_w8a8'"}


class TestKeyMap:
    """Entries that were tuned here for a kernel keyed on arrays, written with the keys of another tool."""

    @pytest.fixture
    def moe(self):
        @tb.tunable(
            space=tb.Space(BLOCK_SIZE_M=[16, 32]),
            heuristic={"BLOCK_SIZE_M": 16},
            bucket={"x": {0: tb.pow2}},
            tuner=fake_tuner(clock := FakeClock()),
        )
        def moe(x, w1, w2, *, causal=False, config):
            clock.spend(1 / config.BLOCK_SIZE_M / len(x))
            return x

        return moe

    def tuned(self, moe, *sizes):
        for m in sizes:
            tb.tune(moe, np.ones((m, 8), np.float32), np.ones((4, 6, 8)), np.ones((4, 8, 3)))
        return list(moe.selector.persistent.store.items(moe.kernel.op_id_v))

    @pytest.mark.parametrize("name", ["vllm", "sglang"])
    def test_entries_tuned_here_become_a_table(self, name, moe, tmp_path):
        records = self.tuned(moe, 5, 16)
        assert formats.write(name, records, tmp_path, key=SIZES) == 1
        (file,) = tmp_path.glob("*")  # no folders of the slashes in a CPU's name
        assert re.fullmatch(r"E=4,N=3,device_name=[^ /]+,dtype=fp8_w8a8\.json", file.name)
        assert json.loads(file.read_text()) == {"8": {"BLOCK_SIZE_M": 32}, "16": {"BLOCK_SIZE_M": 32}}
        assert {r.problem.op for r in formats.read(name, file)} == {"fused_moe@v0"}

    @pytest.mark.parametrize(("name", "spelled"), [("vllm", "[128,64]"), ("sglang", "[128, 64]")])
    @pytest.mark.parametrize("given", ["[128, 64]", "'[128,64]'", "'[128, 64]'"])
    def test_a_block_is_spelled_as_the_loader_of_the_tool_looks_for_it(self, name, spelled, given, moe, tmp_path):
        formats.write(name, self.tuned(moe, 16), tmp_path, key={**SIZES, "block_shape": given})
        (file,) = tmp_path.glob("*")
        assert file.name.endswith(f",dtype=fp8_w8a8,block_shape={spelled}.json")

    def test_two_entries_for_one_row_are_refused_instead_of_losing_one(self, moe, tmp_path):
        (first,) = self.tuned(moe, 16)
        other = first.problem._replace(call_key=first.problem.call_key.replace("false", "true"))
        changed = Record(replace(first.head, problem=other, config=encode({"BLOCK_SIZE_M": 64})), first.body)
        with pytest.raises(tb.CodecError, match=r"two entries differ in it; the second has the key .*--map"):
            formats.write("vllm", [first, changed], tmp_path, key=SIZES)

    def test_a_launch_of_triton_becomes_an_entry_of_fla(self, tmp_path):
        (record,) = formats.read("triton", SAMPLES["triton"])
        # as the Triton adapter writes the key of a launch
        problem = record.problem._replace(op="package.kernel@v0", call_key=_key(**{"n": 300, "x.dtype": "torch.half"}))
        launch = Record(replace(record.head, problem=problem), record.body)
        formats.write("fla", [launch], tmp_path, key={"key": "[n, x.dtype]"})
        (file,) = tmp_path.rglob("kernel.json")
        (back,) = formats.read("fla", file)
        assert back.problem.call_key == '{"key":[300,"torch.half"]}'
        assert back.head.config == record.head.config

    def test_columns_and_tuples_and_cases_are_mapped_too(self, moe, tmp_path):
        records = self.tuned(moe, 16)
        formats.write("aiter", records, tmp_path, key={"M": "x.shape[0]", "K": "x.shape[1] * 2"})
        formats.write("gemlite", records, tmp_path, key={"key": "[x.shape[0], w1.shape[-1] // 3, -1]"})
        formats.write("triton", records, tmp_path / "k.json", key={"key": "[x.shape[0], x.dtype]"})
        formats.write("aiter_triton", records, tmp_path, key={"N": "w1.shape[0]", "case": "['any']"})
        header, row = next(tmp_path.glob("*.csv")).read_text().splitlines()
        assert header == "M,K,BLOCK_SIZE_M,us"
        assert row.startswith("16,16,")
        assert json.loads((tmp_path / "k.json").read_text())["key"] == [16, "float32"]
        texts = " ".join(f"{file.name} {file.read_text()}" for file in tmp_path.glob("*.json"))
        assert '"(16, 2, -1)"' in texts
        assert "-N=4.json" in texts

    @pytest.mark.parametrize(
        ("expression", "error", "message"),
        [
            ("w9.shape[0]", tb.CodecError, r"--map M=w9\.shape\[0\] does not fit .*KeyError.*x: numpy float32"),
            ("fp8_w8a8", tb.CodecError, r"Text needs quotes: --map \"M='...'\""),
            ("x.shape[7]", tb.CodecError, "IndexError"),
            ("x.shape[0] // 0", tb.CodecError, "ZeroDivisionError"),
            ("x +", tb.DefinitionError, "is not an expression"),
            ("open('a')", tb.DefinitionError, r"not understood: \"open\('a'\)\""),
            ("[y for y in x]", tb.DefinitionError, "not understood"),
        ],
    )
    def test_an_expression_that_does_not_fit_is_an_error_that_says_so(self, expression, error, message, moe, tmp_path):
        with pytest.raises(error, match=message):
            formats.write("vllm", self.tuned(moe, 16), tmp_path, key={"E": "1", "N": "2", "M": expression})


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


def test_the_tool_counts_files_and_says_why_others_are_left_out(tmp_path):
    shutil.copytree(SAMPLES["vllm"], tmp_path / "all")
    (tmp_path / "all" / "E=1,N=1,colour=red.json").write_text("{}")
    tool = HERE.parent / "tools" / "count_tables.py"
    done = subprocess.run([sys.executable, tool, "vllm", tmp_path / "all"], capture_output=True, text=True, check=True)
    assert "vllm: 5 of 6 files are read without loss\n  1  it is not a kernel table of vLLM: its name" in done.stdout
    assert done.stdout.endswith("first: E=1,N=1,colour=red.json\n")


@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_the_loaders_of_the_release_read_the_written_tables(package):
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed: `pip install --no-deps {package}` is enough, without a GPU")
    tool = HERE.parent / "tools" / "check_loaders.py"
    done = subprocess.run(
        [sys.executable, tool, Path(found.origin).parents[1]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_folder_without_a_release_is_told(tmp_path):
    tool = HERE.parent / "tools" / "check_loaders.py"
    done = subprocess.run([sys.executable, tool, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, f"{tmp_path} has neither vllm/ nor sglang/: unpack a wheel there\n")
