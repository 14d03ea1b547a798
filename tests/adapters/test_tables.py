"""Configurations that two passes, or a program that is being compiled, ask for: `config_for` and tables."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest

import tunebook as tb

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'tunebook[torch]'")


class _Asking(torch.autograd.Function):
    """Notes the configurations that both passes get, and the threads that they run in."""

    @staticmethod
    def forward(ctx, x, ask, said):
        ctx.save_for_backward(x)
        ctx.ask, ctx.said, ctx.config = ask, said, ask(x)
        said.append(("forward", threading.get_ident(), ctx.config, ctx.config))
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        ctx.said.append(("backward", threading.get_ident(), ctx.config, ctx.ask(x)))
        return dy * 2, None, None


class TestForwardAndBackward:
    """A forward and a backward pass ask for a configuration, in one thread or in two."""

    @pytest.mark.parametrize("in_thread", [False, True])
    def test_both_get_the_same_configuration_of_a_kernel_by_one_tuning(self, in_thread):
        class Scale(tb.Kernel):
            def __init__(self):
                super().__init__("scale")

            def run(self, x, *, cfg):
                return x

            def heuristic_cfg(self, inv):
                return 1

            def candidate_cfgs(self, inv):
                return [1, 2]

        tunings = []
        selector = tb.ConfigSelectorChain(
            tb.ConfigCache(), on_event=lambda event, **_: tunings.append(event) if event == "autotune_start" else None
        )
        executor = tb.Executor(selector)
        config, again = self.passes(lambda x: executor.choose_config(Scale(), x), in_thread)
        assert again == config
        assert tunings == ["autotune_start"]

    @pytest.fixture(params=["config_for", "table"])
    def ask(self, request):
        """Return a function of a tensor that returns its configuration; tunings are in its list `tunings`."""
        tunings = []
        options = {"space": tb.Space(n=[1, 2]), "heuristic": {"n": 1}, "store": False, "check": False}
        options["on_event"] = lambda event, **_: tunings.append(event) if event == "autotune_start" else None

        @tb.tunable(**options)
        def kernel(x, *, config):
            return x

        table = tb.table(
            "asked", key=("rows",), run=lambda x, *, config: x, inputs=lambda rows: torch.ones(rows, 2), **options
        )
        asked = kernel.config_for if request.param == "config_for" else lambda x: table(x.shape[0])
        ask = partial(asked)
        ask.tunings, ask.overlay = tunings, (kernel if request.param == "config_for" else table).overlay
        ask.by_numbers = request.param == "table"
        return ask

    @staticmethod
    def passes(ask, in_thread, forward=nullcontext, **options):
        said = []
        x = torch.ones(4, requires_grad=True)
        with forward():
            y = _Asking.apply(x, ask, said).sum()
        if in_thread:
            backward = threading.Thread(target=y.backward, kwargs=options)
            backward.start()
            backward.join()
        else:
            y.backward(**options)
        (_, here, _, config), (_, there, kept, again) = said
        assert (here != there) == in_thread
        assert kept is config
        return config, again

    @pytest.mark.parametrize("in_thread", [False, True])
    def test_both_get_the_same_configuration_by_one_tuning(self, ask, in_thread):
        config, again = self.passes(ask, in_thread)
        assert again is config
        assert ask.tunings == ["autotune_start"]

    @pytest.mark.parametrize("in_thread", [False, True])
    def test_an_overlay_reaches_the_thread_of_its_block_and_what_a_forward_pass_keeps_holds(self, ask, in_thread):
        config, again = self.passes(ask, in_thread, lambda: ask.overlay(tb.Config(n=7)))
        assert config == {"n": 7}
        assert again != {"n": 7}, "the block has ended"
        with ask.overlay(tb.Config(n=7)):
            config, again = self.passes(ask, in_thread)
        assert config == {"n": 7}
        assert (again == config) == (not in_thread)

    def test_autocast_is_part_of_the_key_of_tensors_and_not_of_numbers(self, ask):
        config, again = self.passes(ask, True, lambda: torch.autocast("cpu", torch.bfloat16))
        assert len(ask.tunings) == (1 if ask.by_numbers else 2)
        assert (again is config) or not ask.by_numbers


def test_a_table_asks_torch_for_its_accelerator(monkeypatch):
    table = tb.table("asked", space=tb.Space(n=[1, 2]), key=("rows",), heuristic={"n": 1}, store=False)
    assert table.problem(3).device == tb.device_fingerprint()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(name="NVIDIA H200"))
    assert table.problem(3).device == "gpu:NVIDIA H200"
    assert f'"torch":"{torch.__version__}"' in table.kernel.environment(None)


def test_nothing_is_tuned_while_a_cuda_graph_is_captured(monkeypatch):
    made = []
    options = {"run": lambda x, *, config: x, "inputs": lambda rows: made.append(rows) or torch.ones(rows)}
    table = tb.table("asked", space=tb.Space(n=[1, 2]), key=("rows",), heuristic={"n": 1}, store=False, **options)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert table(4) == {"n": 1}
        assert made == []
    table(4)
    assert made == [4]


def test_a_table_is_asked_while_a_program_is_compiled():
    table = tb.table("asked", space=tb.Space(n=[3, 4]), key=("rows", "dtype"), heuristic={"n": 3}, store=False)

    def scale(x):
        return x * table(x.shape[0], "float32").n

    table(8, "float32")  # warm, so that there is a lookup to pass over
    program = torch.compile(scale, fullgraph=True, backend="eager", dynamic=False)
    for rows in (4, 8):
        assert (program(torch.ones(rows)) == 3).all()


@pytest.mark.parametrize("transform", ["jit", "grad"])
def test_a_table_is_asked_in_a_trace_of_jax(transform):
    jax = pytest.importorskip("jax")
    events = []
    table = tb.table(
        "asked",
        space=tb.Space(n=[2, 2.0]),
        key=("rows",),
        heuristic={"n": 2},
        store=False,
        inputs=lambda rows: jax.random.normal(jax.random.key(0), (rows,)),
        run=lambda x, *, config: x * config.n,
        on_event=lambda event, **_: events.append(event),
    )

    def scale(x):
        return (x * table(x.shape[0]).n).sum()

    x = jax.numpy.ones(4)
    assert (jax.jit(scale)(x) == 8) if transform == "jit" else (jax.grad(scale)(x) == 2).all()
    assert events[-1] == "autotune_finish"
    assert len(str(jax.make_jaxpr(scale)(x)).splitlines()) <= 5, "nothing of the tuning is left in the program"


def test_an_adapter_that_was_imported_without_its_library_has_no_accelerator(monkeypatch):
    import tunebook.adapters.cupy as adapter

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert adapter._accelerator() is None
