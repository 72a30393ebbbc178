"""Kernels that do for all layers of a step what those in ``patches.py`` do for one.

A program looks up its layer in a table on the device: where tensors lie, their sizes and strides. So the kernels are
compiled once for all networks, and a launch that was recorded has nothing but the tables' addresses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import triton
import triton.language as tl

from penstock.training.kernels.at_once import Layout, Noted, Sums
from penstock.training.kernels.patches import Cut, add_up, entries_of, lay_out, offsets

BR, BN = 64, 16  # rows and columns that a program lays out
ADDED = tl.constexpr(4096)  # numbers that a program adds up at a time
ALIGNED = 64  # numbers: where a tensor begins
WARPS = 8  # of the kernel that adds up


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
            add_up(
                parts, through, out, trial, number, T, C, OWN, N, K, PLACES, PARTS, 4**power, ADDED // 4**power
            )  # fmt: skip


class Laid:
    """Weights of one type that are laid out together, as numbers of one type."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        device = layouts[0].w.device
        starts, end = _starts(layouts)
        self._out = torch.empty(end, device=device, dtype=layouts[0].dtype)
        self.found: dict[Hashable, torch.Tensor] = {}
        rows: list[list[int]] = []
        programs: list[int] = []
        for one, start in zip(layouts, starts, strict=True):
            by, made = one.cut, one.cut.constants["N"]
            trials, k, columns = one.shape
            self.found[one.key()] = self._out[start : start + trials * k * columns].view(one.shape)
            rows.append([
                one.w.data_ptr(), by.between.data_ptr(), start, sum(programs), *offsets(one.w, one.turned),
                by.constants["C"], one.w.shape[3 if one.turned else 2], made, k, by.places,
            ])  # fmt: skip
            programs.append(trials * triton.cdiv(k, BR) * triton.cdiv(made, BN) * by.places)
        self._tables, self._fields = _tables(rows, programs, device), len(rows[0])
        self._like, self._read = layouts[0].w, layouts  # the table has the addresses of what these hold

    def launch(self) -> None:
        """Lay all weights out."""
        table, layers = self._tables
        _spread_all[len(layers),](table, layers, self._like, self._out, self._fields, BR, BN)


class Collected:
    """Gradients that are added up together; ``places``: in the order of a step's gradients."""

    def __init__(self, noted: Sequence[Noted], places: Sequence[int]) -> None:
        device, end = noted[0].out.device, 0
        self._cuts = [one.cut for one in noted]
        rows: list[list[int]] = []
        programs: list[int] = []
        pieces: list[tuple[int, torch.Size | tuple[int, ...]]] = []
        for one in noted:
            trials, count, k, _ = one.parts
            _, made, channels, taps = one.out.shape
            entries, begins = entries_of(count, one.cut), end
            for shape in (one.parts, one.out.shape):
                pieces.append((end, shape))
                end += _room(shape)
            rows.append([
                begins, one.cut.through.data_ptr(), pieces[-1][0], sum(programs), taps, one.cut.constants["C"],
                channels, made, k, one.cut.places, count, entries,
            ])  # fmt: skip
            programs.append(trials * triton.cdiv(made * channels * taps, ADDED.value // entries))
        self._numbers = torch.zeros(end, device=device, dtype=torch.float32)
        tensors = iter([
            self._numbers[start : start + torch.Size(shape).numel()].view(shape) for start, shape in pieces
        ])  # fmt: skip
        self._sums = {place: Sums(next(tensors), next(tensors), True) for place in places}
        self._by = dict(zip(places, self._cuts, strict=True))
        self._tables, self._fields = _tables(rows, programs, device), len(rows[0])

    def of(self, place: int, cut: Cut, parts: tuple[int, ...], out: tuple[int, ...]) -> Sums | None:
        """The memory of a gradient and of its parts, where it waits."""
        found = self._sums.get(place)
        if found is None or self._by[place] is not cut or (found.parts.shape, found.out.shape) != (parts, out):
            return None
        return found

    def written(self) -> bool:
        """Whether torch has written a gradient that waits."""
        return self._numbers._version > 0

    def launch(self) -> None:
        """Add all gradients up."""
        table, layers = self._tables
        _collect_all[len(layers),](table, layers, self._numbers, self._fields, num_warps=WARPS)


def _starts(layouts: Sequence[Layout]) -> tuple[list[int], int]:
    starts, end = [], 0
    for one in layouts:
        starts.append(end)
        end += _room(one.shape)
    return starts, end


def _room(shape: Sequence[int]) -> int:
    """How many numbers a tensor takes, with the gap after it."""
    return -(-torch.Size(shape).numel() // ALIGNED) * ALIGNED


def _tables(rows: list[list[int]], programs: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A row for each layer, and the layer of each program."""
    layers = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(programs))
    return torch.tensor(rows, dtype=torch.int64).to(device), layers.to(device)
