"""The picture of a timeline, and the page that shows it."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.log.events import Asked, Devices, Ended, Opened, Placed
from penstock.log.timeline import Row
from penstock.report.bars import BARS, colour, divided, stack
from penstock.report.page import page, study_page
from penstock.report.timeline import CHART, LANES, SLICES, draw, ticks

SVG = "{http://www.w3.org/2000/svg}"


def there(*names, until=10.0):
    return {name: [(0.0, until)] for name in names}


def parsed(rows, devices, until=10.0):
    return ElementTree.fromstring(draw(rows, devices=devices, until=until))


def lanes(tree):
    return {lane.find(f"{SVG}title").text: lane for lane in tree.iter(f"{SVG}g") if lane.get("class") == "lane"}


def stays(lane):
    """What each bar of a lane says, and its box: left, top, right, bottom."""
    found = {}
    for bar in lane.iter(f"{SVG}rect"):
        x, y, width, height = (float(bar.get(name)) for name in ("x", "y", "width", "height"))
        found[bar.find(f"{SVG}title").text] = (x, y, x + width, y + height)
    return found


def texts(tree):
    return [text.text for text in tree.iter(f"{SVG}text")]


def test_there_is_one_lane_a_device_in_natural_order_and_one_bar_a_row():
    rows = [Row("gpu 10", 3, 0.0, 4.0, 1.0, "solo"), Row("gpu 9", 4, 2.0, 2.0, 1.0, "solo")]
    found = lanes(parsed(rows, there("gpu 10", "gpu 9", "gpu 1")))
    assert list(found) == ["gpu 1", "gpu 9", "gpu 10"]
    assert [list(stays(lane)) for lane in found.values()] == [
        [],
        ["trial 4 · share 1 · solo · 2.0 s – 2.0 s"],
        ["trial 3 · share 1 · solo · 0.0 s – 4.0 s"],
    ]


def test_trials_that_share_a_device_divide_its_lane():
    rows = [Row("a", i, 0.0, 10.0, share, "processes") for i, share in enumerate((0.5, 0.25, 0.25))]
    whole = [Row("b", 3, 0.0, 10.0, 2.0, "distributed")]
    found = lanes(parsed(rows + whole, there("a", "b")))
    ((_, top, _, bottom),) = stays(found["b"]).values()
    boxes = list(stays(found["a"]).values())
    assert [round((box[3] - box[1]) / (bottom - top), 1) for box in boxes] == [0.5, 0.2, 0.2]
    assert all(upper[3] <= lower[1] for lower, upper in pairwise(boxes))


def test_a_trial_has_one_colour_on_all_its_devices_and_neighbours_have_others():
    rows = [Row(name, 4, 0.0, 9.0, 2.0, "distributed") for name in ("a", "b")] + [Row("c", 5, 0.0, 9.0, 1.0, "solo")]
    fills = [
        bar.get("fill")
        for lane in lanes(parsed(rows, there("a", "b", "c"))).values()
        for bar in lane.iter(f"{SVG}rect")
    ]
    assert fills[0] == fills[1] != fills[2]
    assert len({colour(trial)[0] for trial in range(200)}) == 200
    channels = [bytes.fromhex(colour(trial)[0][1:]) for trial in range(200)]
    assert min(sum(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in pairwise(channels)) > 150  # of 765


def test_the_number_of_a_trial_stands_in_its_bar_where_it_fits():
    rows = [Row("a", 1234, 0.0, 5.0, 1.0, "solo"), Row("a", 5678, 5.0, 5.1, 1.0, "solo")]
    assert [text for text in texts(parsed(rows, there("a"))) if text in ("1234", "5678")] == ["1234"]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(1, 4)), max_size=15))
def test_bars_never_overlap_nor_leave_their_lane(stays):
    rows = [Row("a", i, start, start + length, 1 / parts, "fused") for i, (start, length, parts) in enumerate(stays)]
    stacked = stack(rows)
    assert sorted(row.trial for row, _, _ in stacked) == list(range(len(rows)))
    assert all(0 <= low < high <= 1 for _, low, high in stacked)
    for row, low, high in stacked:
        for other, bottom, top in stacked:
            if row.trial < other.trial and row.start < other.end and other.start < row.end:
                assert high <= bottom + 1e-9 or top <= low + 1e-9


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=15), st.sampled_from([0.0, 0.5, 3.0]))
def test_the_trials_of_fused_bundles_fill_the_lane_at_every_moment(stays, apart):
    rows = [Row("a", i, start, start + length, 1 / 512, "fused") for i, (start, length) in enumerate(stays)]
    pieces = divided(rows, apart)
    for piece in pieces:
        beside = [one for one in pieces if one.start <= piece.start < one.end]
        if piece in beside:  # a stay of no length has no moment
            places = sorted((one.low, one.high) for one in beside)
            assert [place[0] for place in places[1:]] == [place[1] for place in places[:-1]]
            assert (places[0][0], places[-1][1]) == (0.0, 1.0)
            assert len({one.row.trial for one in beside}) == len(beside)
    assert {piece.row.trial for piece in pieces} == set(range(len(rows)))


def test_a_fused_trial_that_is_alone_has_the_whole_lane_whatever_its_share():
    rows = [Row("a", 0, 0.0, 10.0, 1 / 512, "fused"), Row("b", 1, 0.0, 10.0, 1.0, "solo")]
    found = lanes(parsed(rows, there("a", "b")))
    ((_, top, _, bottom),), ((_, above, _, below),) = (stays(found[name]).values() for name in "ab")
    assert bottom - top == pytest.approx(below - above)
    assert bottom - top < 30, "a lane is not made high for a share that no trial is drawn with"


def test_each_bundle_of_a_pack_has_a_lane_within_that_of_its_device():
    first = Row("a", 0, 0.0, 10.0, 1.0, "solo", "bundle 1")
    fused = [Row("a", trial, 5.0, 10.0, 0.2, "packed", "bundle 2") for trial in (1, 2)]
    bars = lanes(parsed([first, *fused], there("a")))["a"].iter(f"{SVG}rect")
    boxes = sorted(tuple(float(bar.get(name)) for name in ("x", "y", "height")) for bar in bars)
    (_, top, height), *packed = boxes
    assert [round(box[2] / height, 1) for box in packed] == [0.2, 0.2, 0.5]
    (_, above, one), (_, below, other), (_, alone, _) = packed
    assert top < above < above + one <= below
    assert below + other < alone - 0.5, "a gap between bundles"


def test_a_picture_of_many_fused_trials_is_not_too_large():
    rows = [Row("a", i, i % 97, i % 97 + 500.0 - i % 89, 1 / 512, "fused") for i in range(2000)]
    assert len(draw(rows, devices=there("a", until=600.0), until=600.0)) < 10_000_000


def test_a_lane_is_hatched_only_while_its_device_is_there():
    (lane,) = lanes(parsed([], {"a": [(0.0, 5.0)]}, until=10.0)).values()
    left, width = re.match(r"M([\d.]+) [\d.]+h([\d.]+)", lane.find(f"{SVG}path").get("d")).groups()
    assert float(left) + float(width) == pytest.approx((float(left) + 972) / 2, abs=0.1)


def test_devices_of_a_node_stand_under_its_name():
    rows = [Row("node 1/device 0", 0, 0.0, 1.0, 1.0, "solo")]
    shown = texts(parsed(rows, there("node 0/device 0", "node 0/device 1", "node 1/device 0")))
    assert [text for text in shown if "node" in text or "device " in text] == [
        *("node 0", "device 0", "device 1"),
        *("node 1", "device 0"),
    ]


def heights(tree):
    (area,) = [path.get("d") for path in tree.iter(f"{SVG}path") if path.get("class") == "area"]
    (bottom,) = re.findall(r"^M[\d.]+ ([\d.]+)", area)
    return [round((float(bottom) - float(y)) / CHART, 2) for y in re.findall(r"V([\d.]+)", area)]


def test_the_chart_shows_the_part_of_the_devices_that_is_busy():
    rows = [Row("a", 0, 0.0, 10.0, 1.0, "solo"), Row("b", 1, 0.0, 5.0, 1.0, "solo")]
    assert heights(parsed(rows, there("a", "b"))) == [1.0, 0.5, 0.0]


def test_the_chart_shows_the_mean_of_what_lies_within_a_slice():
    rows = [Row("a", 0, 1.5, 3.25, 1.0, "solo"), Row("a", 1, 5.25, 5.75, 1.0, "solo")]
    tree = parsed(rows, there("a", until=float(SLICES)), float(SLICES))
    assert heights(tree) == [0.0, 0.5, 1.0, 0.25, 0.0, 0.5, 0.0, 0.0]


def test_the_caption_says_what_it_comes_to():
    rows = [Row("a", 0, 0.0, 60.0, 1.0, "solo"), Row("b", 1, 0.0, 30.0, 1.0, "solo")]
    assert "2 devices · 2 trials · 2:00 · utilisation 38%" in texts(parsed(rows, there("a", "b", until=120.0), 120.0))


def test_names_are_escaped_and_long_ones_shortened():
    name = "<gpu> & the other one of that machine"
    tree = parsed([Row(name, 0, 0.0, 1.0, 1.0, "<mode>")], there(name))
    assert list(lanes(tree)) == [name]
    assert list(stays(lanes(tree)[name])) == ["trial 0 · share 1 · <mode> · 0.0 s – 1.0 s"]
    assert "<gpu> & th…hat machine" in texts(tree)


def test_of_many_devices_the_first_are_shown_and_the_picture_says_how_many_more_there_are():
    names = [f"gpu {i}" for i in range(1000)]
    tree = parsed([Row(name, i, 0.0, 1.0, 1.0, "solo") for i, name in enumerate(names)], there(*names))
    assert list(lanes(tree)) == names[:LANES]
    assert "… 936 more devices" in texts(tree)
    assert "1,000 devices · 1,000 trials · 10.0 s · utilisation 10%" in texts(tree)


def test_of_many_rows_the_longest_have_a_bar_and_the_others_are_drawn_together():
    count = BARS + 5_000
    short = [Row(f"gpu {i % 64}", i, i // 64, i // 64 + 1.0, 1.0, "solo") for i in range(count)]
    long = Row("gpu 0", count, 330.0, 390.0, 1.0, "solo")
    devices = there(*(f"gpu {i}" for i in range(64)), until=400.0)
    drawn = draw([*short, long], devices=devices, until=400.0)
    assert len(drawn) < 1_000_000
    tree = ElementTree.fromstring(drawn)
    assert [what for lane in lanes(tree).values() for what in stays(lane)] == [
        f"trial {count} · share 1 · solo · 5:30 – 6:30"
    ]
    assert "short stays, drawn together" in texts(tree)
    assert len(lanes(tree)["gpu 5"].findall(f"{SVG}path")) == 2


def test_a_picture_with_all_the_bars_it_may_have_is_not_too_large():
    rows = [Row(f"gpu {i % 64}", 10_000 + i, i // 64, i // 64 + 1.0, 1.0, "processes") for i in range(BARS)]
    drawn = draw(rows, devices=there(*(f"gpu {i}" for i in range(64)), until=BARS / 64), until=BARS / 64)
    assert drawn.count("<rect x=") == BARS
    assert len(drawn) < 3_000_000


@pytest.mark.parametrize("devices", [{}, there("a", until=0.0)])
def test_a_study_without_a_placement_says_so(devices):
    assert "No trial has been placed on a device yet." in texts(parsed([], devices, until=0.0))


@pytest.mark.parametrize(
    ("until", "labels"),
    [
        (0.004, ["0", "0.0005 s", "0.001 s", "0.0015 s", "0.002 s", "0.0025 s", "0.003 s", "0.0035 s", "0.004 s"]),
        (45.0, ["0", "5 s", "10 s", "15 s", "20 s", "25 s", "30 s", "35 s", "40 s", "45 s"]),
        (3600.0, ["0", "10 min", "20 min", "30 min", "40 min", "50 min", "60 min"]),
        (5 * 3600.0, ["0", "1 h", "2 h", "3 h", "4 h", "5 h"]),
        (86400.0 * 400, ["0", "50 d", "100 d", "150 d", "200 d", "250 d", "300 d", "350 d", "400 d"]),
    ],
)
def test_the_axis_has_round_times_in_one_unit(until, labels):
    assert [label for _, label in ticks(until)] == labels


@given(st.floats(1e-3, 1e9))
def test_the_axis_never_has_too_few_ticks_nor_too_many(until):
    found = ticks(until)
    assert 3 <= len(found) <= 10
    assert found[-1][0] <= until * (1 + 1e-6)


def study():
    return [
        Opened({"metric": "loss", "mode": "min"}),
        Devices(({"name": "gpu 0", "type": "T4"}, {"name": "gpu 1", "type": "T4"}), 0.0),
        Asked(0, {"lr": 1.0}, 3, "g"),
        Placed(0, 1, ("gpu 0",), "solo", None, 1.0),
        Ended("deadline", 4.0),
    ]


def test_a_page_holds_the_figures_the_picture_and_the_best_trials_and_needs_nothing_else():
    best = [{"number": 0, "config.act": "<relu>", "loss": 0.123456, "error": None}, {"number": 1, "loss": 0.5}]
    made = study_page("digits & more", study(), best)
    assert "<h1>digits &amp; more</h1>" in made
    assert "<dt>utilisation</dt><dd>38%</dd>" in made
    assert made.count("<svg") == made.count("</svg>") == 1
    tree = ElementTree.fromstring(made[made.index("<svg") : made.index("</svg>") + 6])
    assert list(stays(lanes(tree)["gpu 0"])) == ["trial 0 · share 1 · solo · 1.0 s – 4.0 s"]
    assert "2 devices · 1 trial · 4.0 s · utilisation 38%" in texts(tree)
    assert '<td class="number">0</td><td>&lt;relu&gt;</td><td class="number">0.1235</td></tr>' in made
    assert '<td class="number">1</td><td></td><td class="number">0.5</td></tr>' in made
    assert '<th class="number">trial</th><th>act</th><th class="number">loss</th>' in made
    assert "error" not in made
    assert not re.findall(r"src=|href=|@import|<script", made)
    assert set(re.findall(r"https?://[^\"]+", made)) == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"url\(([^)]*)\)", made)) == {"#idle"}


def test_a_page_without_trials_has_no_table():
    assert "<table" not in page("digits", {}, "<svg></svg>")
