"""Many processes and machines: one configuration per problem for all ranks of a job."""

from tunebook._base.errors import Disagreement as Disagreement
from tunebook.fleet._agreement.agree import agree as agree
from tunebook.fleet._agreement.agree import assert_agreement as assert_agreement
from tunebook.fleet._agreement.board import Board as Board
from tunebook.fleet._agreement.board import TorchBoard as TorchBoard
from tunebook.fleet._farm.farm import FarmReport as FarmReport
from tunebook.fleet._farm.farm import FarmResult as FarmResult
from tunebook.fleet._farm.farm import FarmStep as FarmStep
from tunebook.fleet._farm.farm import compile_recording as compile_recording
from tunebook.fleet._farm.farm import tune_recording as tune_recording
