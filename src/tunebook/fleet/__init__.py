"""Many processes and machines: one configuration per problem for all ranks of a job."""

from tunebook._errors import Disagreement as Disagreement
from tunebook.fleet._agree import agree as agree
from tunebook.fleet._board import Board as Board
from tunebook.fleet._check import assert_agreement as assert_agreement
from tunebook.fleet._farm import FarmStep as FarmStep
from tunebook.fleet._farm import Report as Report
from tunebook.fleet._farm import Result as Result
from tunebook.fleet._farm import tune_recording as tune_recording
from tunebook.fleet._torch_board import TorchBoard as TorchBoard
