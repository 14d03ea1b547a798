"""Settings from the environment: modes and pins, one table, clear errors."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tunebook as tb
from tunebook._base import environment_variables
from tunebook._base.config_codec import encode
from tunebook._selection.env_pins import fits, parse_pins, parse_values, written


@pytest.fixture
def kernel():
    @tb.tunable(
        space=tb.Space(block=[1, 2, 4], order=["ij", "ji"]),
        heuristic=lambda n: {"block": 4, "order": "ij"},
        check=False,  # its output is its configuration
    )
    def spender(n, *, config):
        return config

    return spender


def events_of(kernel):
    heard = []
    kernel.selector.listen(lambda event, **_: heard.append(event))
    return heard


class TestMisspeltVariables:
    def test_a_call_that_opens_the_book_warns_once_with_the_nearest_name(self, kernel, monkeypatch, tmp_path):
        monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "another"))
        monkeypatch.setenv("TUNEBOOK_MDOE", "frozen")
        with pytest.warns(tb.TunebookWarning, match="'TUNEBOOK_MDOE'; did you mean 'TUNEBOOK_MODE'") as told:
            kernel(8)
        kernel(16)
        assert len(told) == 1

    def test_the_command_warns_too(self, tmp_path):
        command = [sys.executable, "-m", "tunebook", "ls"]
        environment = {"TUNEBOOK_HOME": str(tmp_path), "TUNEBOOK_HOMW": "x", "PATH": ""}
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stderr
        assert told.startswith("tunebook: unknown variable 'TUNEBOOK_HOMW'; did you mean 'TUNEBOOK_HOME'? Valid:")
        assert "Traceback" not in told


class TestInvalidValues:
    @pytest.mark.parametrize(("name", "value"), [("TUNEBOOK_TRUST", "everything"), ("TUNEBOOK_MODE", "cold")])
    def test_they_are_an_error_for_a_call_that_the_book_knows_and_for_the_command(
        self, kernel, monkeypatch, name, value
    ):
        tb.tune(kernel, 8)
        monkeypatch.setenv(name, value)
        with pytest.raises(tb.DefinitionError, match=f"invalid {name}='{value}'; use one of "):
            kernel(8)
        told = subprocess.run([sys.executable, "-m", "tunebook", "ls"], capture_output=True, text=True, check=False)
        assert told.returncode == 2
        assert told.stderr.startswith(f"tunebook: invalid {name}='{value}'; use one of ")

    @pytest.mark.parametrize(("value", "near"), [("everything", ""), ("famly", "; did you mean 'family'?")])
    def test_only_a_near_spelling_is_proposed(self, monkeypatch, value, near):
        monkeypatch.setenv("TUNEBOOK_TRUST", value)
        with pytest.raises(tb.DefinitionError, match=re.escape(f"'near', 'any'{near}") + "$"):
            environment_variables.trust_setting()


class TestModes:
    def test_frozen_tunes_nothing_and_takes_the_heuristic(self, kernel, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
        assert kernel(8) == {"block": 4, "order": "ij"}
        assert "autotune    off: TUNEBOOK_MODE is frozen" in str(kernel.explain(8))

    def test_frozen_answers_from_the_book(self, kernel, monkeypatch):
        known = tb.tune(kernel, 8).config
        kernel.selector.cache.clear()
        monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
        heard = events_of(kernel)
        assert kernel(8) == known
        assert heard == ["cache_hit"]

    def test_replay_makes_only_an_unknown_call_an_error(self, kernel, monkeypatch):
        known = tb.tune(kernel, 8).config
        monkeypatch.setenv("TUNEBOOK_MODE", "replay")
        assert kernel(8) == known
        with pytest.raises(tb.NoConfig, match="TUNEBOOK_MODE is replay") as caught:
            kernel(16)
        assert caught.value.remedy.startswith("TUNEBOOK_MODE=replay tunes nothing: tune this call before")

    def test_a_mode_that_changes_while_the_program_runs_changes_answers_that_are_hot(self, kernel, monkeypatch):
        events = events_of(kernel)
        monkeypatch.setenv("TUNEBOOK_MODE", "off")
        assert [kernel(8) for _ in range(3)] == [{"block": 4, "order": "ij"}] * 3
        monkeypatch.setenv("TUNEBOOK_MODE", "replay")
        with pytest.raises(tb.NoConfig, match="TUNEBOOK_MODE is replay"):
            kernel(8)
        monkeypatch.delenv("TUNEBOOK_MODE")
        assert "autotune_finish" not in events
        kernel(8)
        assert "autotune_finish" in events

    def test_off_does_not_look_into_the_book(self, kernel, monkeypatch):
        tb.tune(kernel, 8)
        kernel.selector.cache.clear()
        monkeypatch.setenv("TUNEBOOK_MODE", "off")
        assert kernel(8) == {"block": 4, "order": "ij"}

    def test_off_runs_a_kernel_without_a_heuristic_on_its_first_candidate(self, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_MODE", "off")

        @tb.tunable(space=tb.Space(block=[3, 5]))
        def bare(n, *, config):
            return config.block

        assert bare(8) == 3

    @pytest.mark.parametrize("mode", ["frozen", "replay", "off"])
    def test_tuning_by_hand_is_an_error_that_says_why(self, kernel, monkeypatch, mode):
        monkeypatch.setenv("TUNEBOOK_MODE", mode)
        with pytest.raises(tb.DefinitionError, match=f"TUNEBOOK_MODE={mode} tunes nothing; unset it"):
            tb.tune(kernel, 8)

    def test_an_unknown_mode_lists_the_known_ones(self, kernel, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_MODE", "cold")
        with pytest.raises(tb.DefinitionError, match="'cold'; use one of 'normal', 'frozen', 'replay', 'off'"):
            kernel(8)

    @pytest.mark.parametrize("mode", ["", "normal"])
    def test_an_empty_mode_is_normal(self, kernel, monkeypatch, mode):
        monkeypatch.setenv("TUNEBOOK_MODE", mode)
        heard = events_of(kernel)
        kernel(8)
        assert "autotune_finish" in heard


class TestPins:
    def test_every_call_gets_the_pinned_candidate_and_nothing_of_it_is_remembered(self, kernel, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_PIN", f"{kernel.kernel.op_id}:block=2,order=ji")
        assert kernel(8) == kernel(9) == {"block": 2, "order": "ji"}
        assert kernel.selector.cache.size() == 0
        assert "pinned" in str(kernel.explain(8))

    def test_the_name_of_the_function_is_enough_and_a_more_exact_one_goes_first(self, kernel, monkeypatch):
        plain = kernel.kernel.op_id.rpartition(".")[2]
        assert plain != kernel.kernel.op_id
        monkeypatch.setenv("TUNEBOOK_PIN", f"{plain}:block=2,order=ji")
        assert kernel(8) == {"block": 2, "order": "ji"}
        monkeypatch.setenv("TUNEBOOK_PIN", f"{plain}:block=2,order=ji; {kernel.kernel.op_id}:block=1,order=ij")
        assert kernel(9) == {"block": 1, "order": "ij"}

    def test_an_override_and_an_overlay_go_before_it(self, kernel, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_PIN", f"{kernel.kernel.op_id}:block=2,order=ji")
        assert kernel(8, config={"block": 1, "order": "ij"}).block == 1
        with kernel.overlay(block=4, order="ji"):
            assert kernel(8).block == 4

    def test_a_pin_goes_before_the_book(self, kernel, monkeypatch):
        tb.tune(kernel, 8)
        monkeypatch.setenv("TUNEBOOK_PIN", f"{kernel.kernel.op_id_v}: block=2, order='ji'")
        kernel.selector.policy = kernel.selector.policy  # forgets what was answered before the pin
        assert kernel(8) == {"block": 2, "order": "ji"}

    @pytest.mark.parametrize(
        ("pin", "says"),
        [
            (
                "block=3,order=ij",
                "which fits no candidate: block=3 is not in the space; it has 1, 2, 4[.] The nearest is",
            ),
            ("block=2,block=1,order=ij", "a value twice"),
            ("blocks=2", "unknown axis 'blocks'; did you mean 'block'"),
            ("block=2", r"fits several candidates; name one exactly, for example [^\[\]]*block=2[^\[\]]* or "),
        ],
    )
    def test_a_pin_that_does_not_name_one_candidate_says_why(self, kernel, monkeypatch, pin, says):
        monkeypatch.setenv("TUNEBOOK_PIN", f"{kernel.kernel.op_id}:{pin}")
        with pytest.raises(tb.DefinitionError, match=says):
            kernel(8)

    def test_a_pin_that_is_nearly_the_name_of_a_kernel_is_told(self, kernel, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_PIN", "spendr:block=2,order=ji; another_kernel:rows=4")
        with pytest.warns(tb.TunebookWarning, match="pins 'spendr', and not 'spender', so it has no effect"):
            kernel(8)

    @pytest.mark.parametrize("text", ["matmul", "matmul:", "matmul:block", "matmul:block=", ":block=2", "m:a=1;m:b=2"])
    def test_a_malformed_pin_is_an_error(self, text):
        with pytest.raises(tb.DefinitionError, match="TUNEBOOK_PIN"):
            parse_pins(text)

    def test_fields_of_a_class_are_pinned_by_name(self, monkeypatch):
        @dataclass(frozen=True)
        class Tile:
            size: int
            flags: tuple[int, ...]

        @tb.tunable(space=[Tile(1, (0, 1)), Tile(2, (0, 1)), Tile(2, (1,))])
        def tiled(n, *, config):
            return config

        monkeypatch.setenv("TUNEBOOK_PIN", f"{tiled.kernel.op_id}:size=2,flags=(0,1)")
        assert tiled(1) == Tile(2, (0, 1))

    def test_a_space_of_a_million_points_is_not_listed(self, monkeypatch):
        axes = {f"axis_{i}": range(10) for i in range(7)}

        @tb.tunable(space=tb.Space(**axes), heuristic=lambda n: dict.fromkeys(axes, 0))
        def wide(n, *, config):
            return config

        monkeypatch.setenv("TUNEBOOK_PIN", f"{wide.kernel.op_id}:" + ",".join(f"{name}=7" for name in axes))
        assert set(wide(1).values()) == {7}

    names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
    values = st.one_of(st.integers(-99, 99).map(str), st.sampled_from(["(0, 1)", "[1, 2]", "'a;b,c'", "true", "1e-3"]))

    @given(st.dictionaries(names, st.dictionaries(names, values, min_size=1), max_size=3))
    def test_pins_survive_a_round_trip_through_text(self, pins):
        text = "; ".join(f"{op}: {', '.join(f'{n}={v}' for n, v in fields.items())}" for op, fields in pins.items())
        assert parse_pins(text) == pins


class TestSigningKey:
    def test_it_is_the_text_or_the_content_of_a_file(self, tmp_path, monkeypatch):
        (tmp_path / "key").write_text("secret\n")
        monkeypatch.setenv("TUNEBOOK_SIGNING_KEY", f"@{tmp_path / 'key'}")
        assert environment_variables.signing_key() == b"secret"
        monkeypatch.setenv("TUNEBOOK_SIGNING_KEY", "other")
        assert environment_variables.signing_key() == b"other"
        monkeypatch.delenv("TUNEBOOK_SIGNING_KEY")
        assert environment_variables.signing_key() is None

    def test_a_missing_or_empty_file_is_an_error(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_SIGNING_KEY", f"@{tmp_path / 'none'}")
        with pytest.raises(tb.DefinitionError, match="cannot be read"):
            environment_variables.signing_key()
        (tmp_path / "none").write_text("")
        with pytest.raises(tb.DefinitionError, match="is empty"):
            environment_variables.signing_key()


@pytest.mark.parametrize("text", ["1", "{", '["a", "b"]'])
def test_options_that_tunebook_run_did_not_write_are_an_error(text, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_RUN", text)
    with pytest.raises(tb.DefinitionError, match=r"invalid TUNEBOOK_RUN=.*; only `tunebook run` sets it: unset it"):
        environment_variables.run_options()


def test_every_variable_that_is_read_is_in_the_table():
    source = Path(environment_variables.__file__).read_text()
    read = set(re.findall(r"environ\.get\(\"(TUNEBOOK_\w+)\"", source)) | {environment_variables.HOME_VARIABLE}
    assert read == {setting.name for setting in environment_variables.SETTINGS}


@pytest.mark.promise("memo-as-fine-as-key")
@pytest.mark.parametrize("listens", [False, True])
def test_a_pin_that_comes_and_goes_while_the_program_runs_answers_while_it_is_set(kernel, monkeypatch, listens):
    if listens:
        events_of(kernel)
    kernel.selector.cache.put(*kernel.problem(8), tb.Config(block=1, order="ji"))
    for _ in range(2):
        assert [kernel(8).block for _ in range(3)] == [1, 1, 1]
        monkeypatch.setenv("TUNEBOOK_PIN", "spender:block=2,order=ij")
        assert [kernel(8).block for _ in range(3)] == [2, 2, 2]
        assert kernel.explain(8).selection.source == "pinned"
        with monkeypatch.context() as patch:
            patch.delitem(environment_variables.os.environ, "TUNEBOOK_PIN")
            assert kernel(8).block == 1
        assert kernel(8).block == 2
        monkeypatch.delenv("TUNEBOOK_PIN")


def test_other_variables_leave_the_memo_alone(kernel, monkeypatch):
    told = []
    environment_variables.on_new_setting(lambda: told.append(1))
    monkeypatch.setenv("PATH_OF_ANOTHER_PROGRAM", "x")
    assert not told
    monkeypatch.setenv("TUNEBOOK_MODE", "normal")
    assert told


class TestMistakesInPins:
    def test_the_traceback_has_the_lines_of_the_program(self, kernel, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_PIN", f"{kernel.kernel.op_id}:block=3,order=ij")
        with pytest.raises(tb.DefinitionError) as caught:
            kernel(8)
        own = [frame for frame in caught.traceback if "tunebook" in str(frame.path) and "tests" not in str(frame.path)]
        assert len(own) <= 2  # the generated call, and the entrance to the library

    def test_a_name_that_no_candidate_has_is_named_with_the_nearest_one(self, kernel, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_PIN", f"{kernel.kernel.op_id}:blok=2,order=ij")
        with pytest.raises(tb.DefinitionError, match="unknown axis 'blok'; did you mean 'block'"):
            kernel(8)

    def test_a_pin_for_a_kernel_that_was_never_called_is_told_when_the_program_ends(self, monkeypatch):
        program = (
            "import tunebook as tb\n"
            "matmul = tb.tunable(lambda n, *, config: n, space=[{'b': 1}], store=False, name='matmul')\n"
            "matmul(1)\n"
        )
        monkeypatch.setenv("TUNEBOOK_PIN", "matrix_multiply:b=1")
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert "TUNEBOOK_PIN had no effect, because no kernel of that name was called: unknown kernel" in ran.stderr
        assert "env_pins.py" not in ran.stderr
        assert "unknown kernel 'matrix_multiply'" in ran.stderr
        assert "Valid: matmul" in ran.stderr
        monkeypatch.setenv("TUNEBOOK_PIN", "matmul:b=1")
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert ran.stderr == ""


class TestTuplesInPins:
    @pytest.fixture
    def tiled(self):
        space = tb.Space(tile=[(4, 4), (8, 4), (16,)], way=["ij", "j,i"], unroll=[1, 2])

        @tb.tunable(space=space, heuristic={"tile": (4, 4), "way": "ij", "unroll": 1}, name="conv", store=False)
        def conv(n, *, config):
            return config

        return conv

    @pytest.mark.parametrize(
        ("pin", "tile", "way"),
        [
            ("tile=8,4,way=ij,unroll=2", (8, 4), "ij"),
            ("tile=(8,4),way=ij,unroll=2", (8, 4), "ij"),
            ("unroll=2, way='j,i', tile=8, 4", (8, 4), "j,i"),
            ("tile=16,way=j,i,unroll=2", (16,), "j,i"),
            ("tile=(16,),way=ij,unroll=2", (16,), "ij"),
        ],
    )
    def test_a_tuple_needs_no_brackets(self, tiled, monkeypatch, pin, tile, way):
        monkeypatch.setenv("TUNEBOOK_PIN", f"conv:{pin}")
        assert tiled(1) == {"tile": tile, "way": way, "unroll": 2}

    @pytest.mark.parametrize(
        ("pin", "says"),
        [
            (
                "tile=8,way=ij,unroll=2",
                "it has (4, 4), (8, 4), (16,). The nearest is TUNEBOOK_PIN=conv:tile=16,way=ij,unroll=2",
            ),
            (
                "tile=8,5,way=ij,unroll=2",
                "it has (4, 4), (8, 4), (16,). The nearest is TUNEBOOK_PIN=conv:tile=8,4,way=ij,unroll=2",
            ),
            ("tile=8,4,way=j.i,unroll=2", "The nearest is TUNEBOOK_PIN='conv:tile=8,4,way='\"'\"'j,i'\"'\"',unroll=2'"),
            ("tile=8,4", "name one exactly, for example TUNEBOOK_PIN=conv:tile=8,4,"),
            ("tle=8,4,way=ij,unroll=2", "The nearest is TUNEBOOK_PIN=conv:tile=8,4,way=ij,unroll=2"),
            ("tile=8,4,way=ij,unrol=2", "The nearest is TUNEBOOK_PIN=conv:tile=8,4,way=ij,unroll=2"),
        ],
    )
    def test_a_pin_that_fits_no_candidate_gets_the_nearest_as_it_is_typed(self, tiled, monkeypatch, pin, says):
        monkeypatch.setenv("TUNEBOOK_PIN", f"conv:{pin}")
        with pytest.raises(tb.DefinitionError, match=re.escape(says)):
            tiled(1)

    @pytest.mark.parametrize(("written", "copy"), [("1", True), ("0", False), ("tru", True), ("fals", False)])
    def test_the_nearest_of_a_switch_is_the_one_that_was_meant(self, monkeypatch, written, copy):
        @tb.tunable(space=tb.Space(tile=[(64, 64)], copy=[False, True]), name="tr", store=False)
        def tr(n, *, config):
            return config

        monkeypatch.setenv("TUNEBOOK_PIN", f"tr:tile=64,64,copy={written}")
        with pytest.raises(tb.DefinitionError, match=f"The nearest is TUNEBOOK_PIN=tr:tile=64,64,copy={copy}"):
            tr(1)

    scalars = st.one_of(st.integers(-9, 99), st.booleans(), st.text("ab,;=' x", max_size=4))

    @given(st.dictionaries(st.sampled_from("abc"), st.one_of(scalars, st.lists(scalars).map(tuple)), min_size=1))
    def test_every_written_configuration_is_read_back(self, config):
        text = ",".join(written(config))
        pairs = dict(parse_values(text))
        assert pairs.keys() == config.keys()
        assert fits(encode(config), pairs)
