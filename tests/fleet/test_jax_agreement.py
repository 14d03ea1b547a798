"""Ranks of jax.distributed jobs use one configuration per problem, in a trace too, also when some are killed."""

from __future__ import annotations

import pytest
from agreement_jobs import check_job, run_job

import tunebook as tb
from tunebook import fleet

pytest.importorskip("jax")

from tunebook.adapters import jax as tbx


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_ranks_over_the_coordination_service_agree_and_outlive_killed_ranks(world, tmp_path):
    check_job(run_job("jax", world, tmp_path))


@pytest.mark.parametrize("agree", [tbx.agree, lambda: fleet.agree("jax")])
def test_agreeing_without_a_job_is_an_error_that_names_the_call(agree):
    with pytest.raises(tb.Unsupported, match=r"jax\.distributed\.initialize"):
        agree()
