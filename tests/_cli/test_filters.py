"""`--kernel` and `--device`: given several times, and misspelt; options that are given twice."""

from __future__ import annotations

import json

import pytest
from cli_fixtures import OnABook, python

from tunebook._cli import main
from tunebook._cli._filters import Filters


def packed(run, *words):
    """Return the kernels of a pack that the command writes."""
    return [row["kernel"] for row in json.loads(run("pack", "x.db", "--json", *words)[1])["kernels"]]


class TestSeveral(OnABook):
    def test_entries_of_all_named_kernels_are_taken(self, place, run):
        both = ("--kernel", "matmul", "--kernel", "sca*")
        assert len(json.loads(run("ls", "--json", *both)[1])) == 6
        assert packed(run, *both) == ["matmul@v0", "scale@v0"]
        assert packed(run, "--kernel", "matmul") == ["matmul@v0"]

    def test_entries_of_all_named_devices_are_taken(self, place, run):
        assert len(json.loads(run("ls", "--json", "--device", "h200", "--device", "cpu")[1])) == 6
        assert Filters(device=("h200", "mi300")).takes_kernel("scale@v0", "gpu:NVIDIA H200")
        assert not Filters(device=("h200", "mi300")).takes_kernel("scale@v0", "gpu:NVIDIA A100")

    def test_calls_of_a_recording_are_chosen_the_same_way(self, place, run):
        program = "import mykernels as m; m.main()"
        assert python("-m", "tunebook", "run", "--record", "calls.json", "--", "-c", program, cwd=place).returncode == 0
        words = ("tune", "calls.json", "--dry-run", "--json", "--kernel", "matmul", "--kernel", "scale")
        found = json.loads(python("-m", "tunebook", *words, cwd=place).stdout)
        assert {result["kernel"] for result in found} == {"matmul@v0", "scale@v0"}

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("ls", "--newer-than", "1d", "--newer-than", "2d"), "--newer-than is given twice; give it once"),
            (("report", "-o", "a.html", "--output", "b.html"), "--output is given twice; give it once"),
        ],
    )
    def test_an_option_that_takes_one_value_may_not_be_given_twice(self, words, said, capsys):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert said in capsys.readouterr().err


class TestMisspelt(OnABook):
    @pytest.mark.parametrize(
        "words",
        [("ls",), ("export", "x.bundle"), ("pack", "x.db"), ("prune", "--unused", "0s", "--dry-run"), ("report",)],
    )
    def test_a_kernel_that_the_book_does_not_have_is_named_with_the_nearest(self, place, run, words):
        code, _, err = run(*words, "--kernel", "matmull")
        assert code == 1
        assert f"no kernel in {place / 'home'} matches --kernel matmull; did you mean matmul?" in err

    def test_one_of_several_is_named_too_and_the_others_are_taken(self, place, run):
        code, out, err = run("export", "x.db", "--kernel", "scale", "--kernel", "xyz*")
        assert code == 0
        assert "5 entries" in out
        assert err == (f"tunebook: no kernel in {place / 'home'} matches --kernel xyz*; there are matmul, scale\n")

    @pytest.mark.parametrize("words", [(), ("--check",)])
    def test_no_pack_is_written_without_an_entry_that_it_was_to_have(self, place, run, words):
        assert not words or run("pack", "x.db", "--kernel", "scale")[0] == 0
        code, out, err = run("pack", "x.db", "--kernel", "scale", "--kernel", "xyz*", *words)
        assert (code, out, (place / "x.db").exists()) == (1, "", bool(words))
        assert err.startswith(
            f"tunebook: no kernel in {place / 'home'} matches --kernel xyz*; there are matmul, scale\n"
        )
        assert err.endswith("nothing to pack: each --kernel and --device must match an entry\n")

    def test_a_device_is_named_as_well(self, place, run):
        code, out, err = run("ls", "--json", "--device", "h200")
        assert (code, json.loads(out)) == (1, [])
        assert f"no device in {place / 'home'} matches --device h200; there are cpu:" in err

    def test_so_is_a_kernel_that_a_recording_does_not_have(self, place, run):
        program = "import mykernels as m; m.scale(8)"
        assert python("-m", "tunebook", "run", "--record", "calls.json", "--", "-c", program, cwd=place).returncode == 0
        for words in (("tune", "calls.json"), ("verify", "--recording", "calls.json")):
            code, _, err = run(*words, "--kernel", "scael")
            assert code == 1
            assert "no kernel in calls.json matches --kernel scael; did you mean scale?" in err
