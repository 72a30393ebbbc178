"""Kernels that do for all layers of a step what those in ``patches.py`` do for one.

A program looks up its layer in a table on the device: where tensors lie, their sizes and strides. So the kernels are
compiled once for all networks, and a launch that was recorded has nothing but the tables' addresses.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import torch
import triton
import triton.language as tl

from penstock.training.kernels.at_once import Layout, Noted, Sums
from penstock.training.kernels.patches import ADDED, WARPS, Cut, add_up, entries_of, lay_out, offsets

BR, BN = 64, 16  # rows and columns that a program lays out
ALIGNED = 64  # numbers: where a tensor begins


@triton.jit(do_not_specialize=["like"])
def _spread_all(
    table, layers, like, out, FIELDS: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """``_spread`` of many weights; ``like`` has their type."""
    table += tl.load(layers + tl.program_id(0)) * FIELDS
    w = tl.load(table).to(like.dtype)
    between = tl.load(table + 1).to(layers.dtype)
    out += tl.load(table + 2)
    at = tl.program_id(0) - tl.load(table + 3).to(tl.int32)
    first = tl.load(table + 4).to(tl.int32)
    trial_step = tl.load(table + 5)
    tap_step = tl.load(table + 6).to(tl.int32)
    c_step = tl.load(table + 7).to(tl.int32)
    n_step = tl.load(table + 8).to(tl.int32)
    T = tl.load(table + 9).to(tl.int32)
    C = tl.load(table + 10).to(tl.int32)
    OWN = tl.load(table + 11).to(tl.int32)
    N = tl.load(table + 12).to(tl.int32)
    K = tl.load(table + 13).to(tl.int32)
    PLACES = tl.load(table + 14).to(tl.int32)
    own = at % PLACES
    at = at // PLACES
    across = tl.cdiv(N, BN)
    n = at % across * BN + tl.arange(0, BN)
    at = at // across
    down = tl.cdiv(K, BR)
    row = at % down * BR + tl.arange(0, BR)
    trial = (at // down).to(tl.int64)
    lay_out(
        w, between, out, trial, own, row, n, first, trial_step, tap_step, c_step, n_step, T, C, OWN, N, K, PLACES, 0
    )


@triton.jit
def _collect_all(table, layers, numbers, FIELDS: tl.constexpr):
    """``_collect`` of many gradients; parts and gradients are pieces of ``numbers``."""
    table += tl.load(layers + tl.program_id(0)) * FIELDS
    parts = numbers + tl.load(table)
    through = tl.load(table + 1).to(layers.dtype)
    out = numbers + tl.load(table + 2)
    at = tl.program_id(0) - tl.load(table + 3).to(tl.int32)
    T = tl.load(table + 4).to(tl.int32)
    C = tl.load(table + 5).to(tl.int32)
    OWN = tl.load(table + 6).to(tl.int32)
    N = tl.load(table + 7).to(tl.int32)
    K = tl.load(table + 8).to(tl.int32)
    PLACES = tl.load(table + 9).to(tl.int32)
    PARTS = tl.load(table + 10).to(tl.int32)
    entries = tl.load(table + 11).to(tl.int32)
    blocks = tl.cdiv(OWN * T * N, ADDED // entries)
    trial = (at // blocks).to(tl.int64)
    for power in tl.static_range(5):  # so the order of additions is that of a launch for the layer alone
        if entries == 4**power:
            number = at % blocks * (ADDED // 4**power) + tl.arange(0, ADDED // 4**power)
            add_up(parts, through, out, trial, number, T, C, OWN, N, K, PLACES, PARTS, 4**power, ADDED // 4**power)


class Laid:
    """Weights of one type that are laid out together, as numbers of one type."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._like, device = layouts[0].w, layouts[0].w.device
        self._layouts = layouts  # the table has the addresses of their tensors
        self._out, pieces = _pieces([one.shape for one in layouts], layouts[0].dtype, device)
        self.found: dict[Hashable, torch.Tensor] = {}
        table = _Table()
        for one, (start, piece) in zip(layouts, pieces, strict=True):
            self.found[one.key()] = piece
            by, own = one.cut, one.w.shape[3 if one.turned else 2]
            channels, made, k = (by.constants[name] for name in ("C", "N", "K"))
            numbers = (*offsets(one.w, one.turned), channels, own, made, k, by.places)
            programs = len(one.w) * triton.cdiv(k, BR) * triton.cdiv(made, BN) * by.places
            table.add((one.w.data_ptr(), by.between.data_ptr(), start), numbers, programs)
        self._table, self._layers = table.on(device)

    def launch(self) -> None:
        """Lay all weights out."""
        fields = self._table.shape[1]
        _spread_all[len(self._layers),](self._table, self._layers, self._like, self._out, fields, BR, BN)


class Collected:
    """Gradients that are added up together, by their place among the gradients of a step."""

    def __init__(self, noted: Mapping[int, Noted]) -> None:
        device = next(iter(noted.values())).out.device
        shapes = [shape for one in noted.values() for shape in (one.parts, one.out.shape)]
        self._numbers, pieces = _pieces(shapes, torch.float32, device)
        self._cuts = {place: one.cut for place, one in noted.items()}  # the table has the addresses of their tensors
        self._sums: dict[int, Sums] = {}
        table = _Table()
        for (place, one), (start, parts), (to, out) in zip(noted.items(), pieces[::2], pieces[1::2], strict=True):
            self._sums[place] = Sums(parts, out, True)
            (trials, count, k, _), (_, made, channels, taps) = one.parts, one.out.shape
            entries = entries_of(count, one.cut)
            numbers = (taps, one.cut.constants["C"], channels, made, k, one.cut.places, count, entries)
            programs = trials * triton.cdiv(made * channels * taps, ADDED.value // entries)
            table.add((start, one.cut.through.data_ptr(), to), numbers, programs)
        self._table, self._layers = table.on(device)

    def of(self, place: int, cut: Cut, parts: tuple[int, ...], out: tuple[int, ...]) -> Sums | None:
        """The memory of a gradient and of its parts, where it waits."""
        found = self._sums.get(place)
        if found is None or self._cuts[place] is not cut or (found.parts.shape, found.out.shape) != (parts, out):
            return None
        return found

    def written(self) -> bool:
        """Whether torch has written a gradient that waits."""
        return self._numbers._version > 0

    def launch(self) -> None:
        """Add all gradients up."""
        fields = self._table.shape[1]
        _collect_all[len(self._layers),](self._table, self._layers, self._numbers, fields, num_warps=WARPS)


class _Table:
    """A row of numbers for each layer."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []
        self._programs: list[int] = []

    def add(self, places: tuple[int, int, int], numbers: Sequence[int], programs: int) -> None:
        """A layer: where its tensors lie, its sizes and strides, and how many programs work on it."""
        self._rows.append([*places, sum(self._programs), *numbers])
        self._programs.append(programs)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The table on a device, and the layer of each program."""
        layers = torch.repeat_interleave(torch.tensor(self._programs)).int()
        return torch.tensor(self._rows).to(device), layers.to(device)


def _pieces(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, list[tuple[int, torch.Tensor]]]:
    """Memory for some tensors, and each tensor with its place there."""
    starts, end = [], 0
    for shape in shapes:
        starts.append(end)
        end += -(-math.prod(shape) // ALIGNED) * ALIGNED
    whole = torch.zeros(end, dtype=dtype, device=device)
    found = zip(starts, shapes, strict=True)
    return whole, [(start, whole[start : start + math.prod(shape)].view(shape)) for start, shape in found]
