"""Places for records. `_protocol` defines the contract of a store; `open_store` picks the engine by path or address."""

from tunebook.stores._directory import DirectoryStore as DirectoryStore
from tunebook.stores._files import LeaseFiles as LeaseFiles
from tunebook.stores._files import problem_id as problem_id
from tunebook.stores._json import JsonStore as JsonStore
from tunebook.stores._layered import LayeredStore as LayeredStore
from tunebook.stores._layered import announced as announced
from tunebook.stores._layered import packs_beside as packs_beside
from tunebook.stores._layered import packs_in as packs_in
from tunebook.stores._layered import shipped_in as shipped_in
from tunebook.stores._layered import shipped_with as shipped_with
from tunebook.stores._memory import MemoryStore as MemoryStore
from tunebook.stores._open import FILE_ENGINES as FILE_ENGINES
from tunebook.stores._open import file_kinds as file_kinds
from tunebook.stores._open import is_address as is_address
from tunebook.stores._open import open_remote as open_remote
from tunebook.stores._open import open_shared as open_shared
from tunebook.stores._open import open_store as open_store
from tunebook.stores._pack import PackStore as PackStore
from tunebook.stores._pack import write_pack as write_pack
from tunebook.stores._protocol import LeaseBoard as LeaseBoard
from tunebook.stores._protocol import Store as Store
