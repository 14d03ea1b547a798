"""The parts that the time of a kernel may be made of, by its sizes, and by the blocks that divide them."""

from __future__ import annotations

from itertools import combinations
from itertools import product as product_of
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_STUDIED: Final = 14  # configurations that the structure and the scales are found from
_SHARED_STEPS: Final = 200  # of fitting the sum that all configurations start from
# Steps from there of each configuration: as many as there are problems, because more fit few problems too closely. With
# 10 to 40 problems of four Triton kernels, choices after 400 steps were 10 to 20 % farther from the best.
QUICK: Final = 60
_THOROUGH: Final = 400
_VECTOR: Final = 8  # numbers of 32 bits in a vector of most processors
_ALIGNED: Final = 64  # numbers of 2 bytes in a line of a cache: rows of a multiple of it begin at a line
_SHARPNESS: Final = 4.0  # of the edge of a cache: its effect is seen from 0.7 to 1.4 times its size


class Block(NamedTuple):
    """One or two axes whose product divides a size into blocks.

    Blocks are launched side by side ("launch"), are the steps of a loop ("loop"), or are computed one after the other,
    and the rest of the size in another way ("split"), as C programs for a processor do it.
    """

    axes: tuple[str, ...]
    size: int
    role: str


class Structure(NamedTuple):
    """The meaning of axes and sizes: blocks, and sizes of which each unit is launched by itself.

    `windows` has pairs of a size and the window that moves along it: the work follows the number of the window's
    places, not the size.
    """

    blocks: tuple[Block, ...] = ()
    launched: frozenset[int] = frozenset()
    windows: frozenset[tuple[int, int]] = frozenset()

    def counted(self, np: Any, sizes: Any) -> Any:
        """Return sizes by problem; of a size along which a window moves, the number of the window's places."""
        found = sizes.copy()
        for size, window in self.windows:
            found[:, size] = np.maximum(sizes[:, size] - sizes[:, window] + 1, 1)
        return found


class Measured(NamedTuple):
    """The data: sizes by problem; times and their weights by configuration and problem; axes by configuration."""

    np: Any
    axes: Mapping[str, Any]
    cores: int
    sizes: Any
    times: Any
    weights: Any

    def some(self, configs: Any, problems: Any) -> Measured:
        """Return a part of the data."""
        view = self.np.ix_(configs, problems)
        axes = {name: values[configs] for name, values in self.axes.items()}
        return self._replace(axes=axes, sizes=self.sizes[problems], times=self.times[view], weights=self.weights[view])

    def studied(self) -> Any:
        """Return the configurations that are fast most often."""
        return self.np.argsort(-self.weights.sum(1), kind="stable")[:_STUDIED]

    def counted(self, structure: Structure, sizes: Any) -> tuple[Any, Any]:
        """Return how many blocks are launched at sizes, and how many steps each loops."""
        np = self.np
        blocks, steps = np.ones((2, len(self.times), len(sizes)))
        for block in structure.blocks:
            count = np.ceil(sizes[None, :, block.size] / self._length(block))
            blocks = blocks * count if block.role == "launch" else blocks
            steps = steps * count if block.role == "loop" else steps
        for size in structure.launched:
            blocks = blocks * sizes[None, :, size]
        return blocks, steps

    def _length(self, block: Block) -> Any:
        return self.np.prod([self.axes[axis] for axis in block.axes], 0)[:, None]

    def products(self, structure: Structure, sizes: Any, resident: Any = None) -> Any:
        """Return the parts that a time may be made of: an array by configuration, problem and product.

        `resident` has the number of blocks that a core runs at once, by configuration; else a core runs one.
        """
        np = self.np
        blocks, steps = self.counted(structure, sizes)
        waves = np.ceil(blocks / self.cores)
        one = np.ones_like(blocks)
        plain = [one * size for size in sizes.T]
        found = [one, waves, steps, waves * steps, blocks, blocks * steps, *plain]
        found += [factor * size for factor in (waves, blocks) for size in plain]
        found += [a * b for a, b in combinations(plain, 2)]
        found += [np.prod(plain, 0)] if len(plain) > 2 else []
        if resident is not None:
            rounds = np.ceil(waves / resident[:, None])
            last = waves - (rounds - 1) * resident[:, None]  # blocks of a core in the last round
            found += [factor * part for factor in (rounds, rounds - 1, last) for part in (one, steps)]
            found += [rounds * size for size in plain]
        return np.stack([*found, *self._split(structure, plain)], 2)

    def _split(self, structure: Structure, plain: Sequence[Any]) -> Iterator[Any]:
        """Yield the products of parts of sizes where blocks split one: whole blocks, the rest, whether there is one.

        The rest has two parts, because compilers make vectors of its loop too.
        """
        split = {block.size: self._length(block) for block in structure.blocks if block.role == "split"}
        parts = [[size**0, size] for size in plain]
        for place, length in split.items():
            whole, rest = plain[place] // length, plain[place] % length
            parts[place] = [rest**0, whole, rest // _VECTOR, rest % _VECTOR, (rest > 0).astype(float)]
        for factors in product_of(*parts) if split else ():
            yield self.np.prod(factors, 0)

    def inputs(self, structure: Structure, sizes: Any, resident: Any = None, cache: float = 0.0) -> dict[str, Any]:
        """Return the inputs of the process by name, arrays by configuration and problem.

        A name begins with the kind of the input. `cache` is the number of elements that a cache has room for.
        """
        np = self.np
        blocks, _ = self.counted(structure, sizes)
        waves = np.ceil(blocks / self.cores)
        found = {"wave": waves, "full": waves * self.cores / blocks}
        if resident is not None:
            rounds = np.ceil(waves / resident[:, None])
            found |= {"round": rounds, "filled": rounds * resident[:, None] * self.cores / blocks}
        for block in structure.blocks:
            length, size, name = self._length(block), sizes[None, :, block.size], " ".join(block.axes)
            count = np.ceil(size / length)
            found |= {f"steps {name}": count} if block.role == "loop" else {}
            found[f"waste {name}"] = 1 + size % length / size if block.role == "split" else count * length / size
        for place, size in enumerate(sizes.T):
            found[f"size {place}"] = np.broadcast_to(size, blocks.shape)
            found[f"aligned {place}"] = np.broadcast_to(np.gcd(size.astype(np.int64), _ALIGNED), blocks.shape)
        found = {name: np.log2(values) for name, values in found.items()}
        if cache:
            beyond = 1 / (1 + np.exp(-_SHARPNESS * (np.log2(touched(sizes)) - np.log2(cache))))
            found["cache"] = np.broadcast_to(2 * beyond, blocks.shape)
        return found


def touched(sizes: Any) -> Any:
    """Return how many elements a problem has in its arrays, if each array has two of the sizes."""
    columns = list(sizes.T)
    return sum(a * b for a, b in combinations(columns, 2)) if len(columns) > 1 else columns[0]


def fit_sums(np: Any, products: Any, times: Any, measured: Any, steps: int | None = None) -> Any:
    """Return weights of products, not negative, whose sums have the smallest relative errors."""
    steps = steps or min(max(QUICK, times.shape[1]), _THOROUGH)
    parts = np.where(measured[:, :, None], products / times[:, :, None], 0.0)
    usual = parts.mean(1, keepdims=True) + 1e-30
    parts = parts / usual
    squares, aims = parts.transpose(0, 2, 1) @ parts, parts.sum(1)
    # The part that all configurations share is learnt first: few steps from there are better than many from nothing.
    shared = _fewer_errors(squares.sum(0)[None], aims.sum(0)[None], np.full((1, aims.shape[1]), 1.0), _SHARED_STEPS)
    weights = _fewer_errors(squares, aims, np.maximum(shared, 1e-6) + np.zeros_like(aims), steps)
    return weights / usual[:, 0]


def _fewer_errors(squares: Any, aims: Any, weights: Any, steps: int) -> Any:
    """Return weights after so many steps, each of which lowers the squared errors and keeps every sign."""
    for _ in range(steps):
        weights = weights * aims / ((squares @ weights[:, :, None])[:, :, 0] + 1e-12)
    return weights


def total(np: Any, products: Any, weights: Any) -> Any:
    return np.maximum((products @ weights[:, :, None])[:, :, 0], 1e-300)
