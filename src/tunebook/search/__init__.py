"""Search of spaces that are too big to race whole: see docs/search.md."""

from tunebook._base.vocabulary import StrategyLike as StrategyLike
from tunebook.search._by_name import Portfolio as Portfolio
from tunebook.search._by_name import Search as Search
from tunebook.search._by_name import check_strategy as check_strategy
from tunebook.search._by_name import listed as listed
from tunebook.search._guided import Guided as Guided
from tunebook.search._learned_heuristic import Example as Example
from tunebook.search._learned_heuristic import Fit as Fit
from tunebook.search._learned_heuristic import fit as fit
from tunebook.search._learned_heuristic import fit_book as fit_book
from tunebook.search._prediction import Prediction as Prediction
from tunebook.search._prediction import predict as predict
from tunebook.search._simple import Evolution as Evolution
from tunebook.search._simple import Exhaustive as Exhaustive
from tunebook.search._simple import Local as Local
from tunebook.search._simple import Random as Random
from tunebook.search._size_model import SizeModel as SizeModel
from tunebook.search._strategy import Observation as Observation
from tunebook.search._strategy import Start as Start
from tunebook.search._strategy import Strategy as Strategy
from tunebook.search._t1 import Expression as Expression
from tunebook.search._t1 import from_kernel_tuner as from_kernel_tuner
from tunebook.search._t1 import read_t1 as read_t1
from tunebook.search._t1 import write_t1 as write_t1
from tunebook.search._warm_start import Nearest as Nearest
from tunebook.search._warm_start import nearest as nearest
