"""Ranks of torch.distributed jobs use one configuration per problem, also when some are killed."""

from __future__ import annotations

from datetime import timedelta

import pytest
from agreement_jobs import check_job, run_job

import tunebook as tb
from tunebook import fleet

pytest.importorskip("torch")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_over_gloo_agree_and_outlive_killed_ranks(world, tmp_path):
    check_job(run_job("torch", world, tmp_path))


def test_agreeing_without_a_process_group_is_an_error_that_names_the_call():
    with pytest.raises(tb.Unsupported, match=r"torch\.distributed\.init_process_group"):
        fleet.agree("torch")


def test_a_failing_tcp_store_is_a_store_error_that_names_it():
    import torch.distributed as dist

    from tunebook.fleet._agreement.board import TorchBoard

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = TorchBoard(dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=1)), rank=1, world=2)
    assert board.add("n", 1) == 1
    del server
    with pytest.raises(tb.StoreError, match=r"torch\.distributed's TCPStore failed"):
        board.add("n", 1)
