"""Tables for a terminal: a study's best trials, its summary, and the studies of a folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from penstock.log.events import Kind
from penstock.log.history import History, TrialRecord
from penstock.log.messages import said_mode
from penstock.log.ranking import no_best
from penstock.report import energy
from penstock.report.console import Careful
from penstock.report.format import clock, short, size, spent, value
from penstock.report.format import width as width
from penstock.report.progress import STATES
from penstock.report.summary import ending
from penstock.trial import Config

BARS = "▁▂▃▄▅▆▇█"
PLAIN_WIDTH = 120  # characters of a line that goes to a file or a pipe
MEASURED = 10  # rows of the table of measurements


def console() -> Console:
    """The console for tables: stdout, as wide as its terminal."""
    out = Careful(highlight=False, markup=False, emoji=False)
    if not out.is_terminal:
        out.width = max(PLAIN_WIDTH, out.width)
    return out


def best_trials(history: History, trials: Sequence[TrialRecord], console: Console) -> RenderableType:
    """One row a trial. A narrow terminal shows no device seconds; a narrower one has the config in a single column."""
    if not trials:
        none = f"No trial has reported a finite {history.metric} yet."
        return Text(no_best(history) if history.ended else none, style="yellow")
    names = list(dict.fromkeys(name for trial in trials for name in trial.measured))
    wide = console.options.update(max_width=10_000)
    for seconds in (True, False):
        table = _trials(history, trials, names, seconds)
        if Measurement.get(console, wide, table).maximum <= console.width:
            return table
    return _trials(history, trials, None)


def _trials(history: History, trials: Sequence[TrialRecord], names: list[str] | None, seconds: bool = True) -> Table:
    """A table of trials; ``names`` are the config's columns, and None puts the config into a single column."""
    metrics = list(dict.fromkeys(name for trial in trials for name in trial.metrics))
    metrics.sort(key=lambda name: name != history.metric)
    table = _table()
    table.add_column("trial", justify="right", no_wrap=True)
    if several := any(trial.variant for trial in history.trials):
        table.add_column("width", no_wrap=True)
    for name in metrics:
        table.add_column(name, justify="right", style="bold green" if name == history.metric else "", no_wrap=True)
    for name in ("config",) if names is None else names:
        table.add_column(name, justify="left" if names is None else "right", style="cyan", overflow="fold")
    table.add_column("budget", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=names is not None)
    metered = seconds and any(trial.joules is not None for trial in trials)
    if seconds:
        table.add_column("device s", justify="right", no_wrap=True)
    if metered:
        table.add_column("kJ", justify="right", no_wrap=True)
    for trial in trials:
        config = trial.measured
        table.add_row(
            str(trial.number),
            *([width(trial.scale)] if several else []),
            *(value(trial.metrics.get(name, "")) for name in metrics),
            *([short(config)] if names is None else [value(config.get(name, "")) for name in names]),
            str(trial.reported),
            Text(trial.standing, style=STATES[trial.outcome]),
            *([f"{trial.device_seconds:.2f}"] if seconds else []),
            *([""] if metered and trial.joules is None else [f"{(trial.joules or 0.0) / 1e3:.3g}"] if metered else []),
        )
    return table


def study_summary(facts: dict[str, Any], carbon: float | None = None) -> RenderableType:
    """A summary of a study, one line a fact; ``carbon`` is grams of CO2 for a kWh."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row("study", Text(facts["name"], style="bold"))
    rows.add_row("task", facts["task"] + (f" in {facts['file']}" if facts["file"] else ""))
    sampler = f" with {facts['sampler']}" if facts["sampler"] else ""
    rows.add_row("algorithm", f"{facts['algorithm']}{sampler}, seed {facts['seed']}")
    rows.add_row("metric", said_mode(facts) + _if(" until {}", facts["target"]))
    trials = facts["trials"]
    counts = [Text(f"{trials[s]} {s}", style=style) for s, style in STATES.items() if trials.get(s)]
    rows.add_row("trials", Text("  ").join([*counts, *_total(facts)]))
    if facts["surrogates"]:
        rows.add_row("surrogates", Text(_surrogates(facts)))
    rows.add_row("best", _best(facts))
    used = ("simulated: " if facts["simulated"] else "") + clock(facts["seconds"])
    rows.add_row("time", used + _if(" of {}", facts["deadline"] and clock(facts["deadline"])))
    if facts["cost"]:
        rows.add_row("cost", spent(facts["cost"]))
    for name, line in energy.said(facts, carbon):
        rows.add_row(name, line)
    rows.add_row("trained", f"{facts['units']:,} units in {clock(facts['device_seconds'])} on devices")
    if "devices" in facts:
        rows.add_row("devices", f"{facts['devices']}, busy {facts['utilisation']:.0%} of the time")
    if facts["modes"]:
        rows.add_row("modes", "  ".join(f"{count} {mode}" for mode, count in facts["modes"].items()))
    for device, bundles in facts.get("packs", {}).items():
        rows.add_row("pack", _pack(device, bundles))
    if facts.get("solo"):
        rows.add_row("solo", Text(facts["solo"], style="yellow"))
    rows.add_row("states", f"{size(facts['state_bytes'])} {_if('in {}', facts['states']) or 'on disk'}")
    rows.add_row("model", facts["model"] or Text("none saved", style="dim"))
    rows.add_row("ended", ending(facts))
    return rows


def _pack(device: str, bundles: Sequence[Sequence[int]]) -> str:
    """The bundles that were together on a device, the largest first.

    >>> _pack("gpu 0", [[4], [0, 2, 3]])
    '2 bundles at once on gpu 0: trials 0 2 3 | 4'
    """
    parts = [" ".join(map(str, sorted(one))) for one in sorted(bundles, key=lambda one: (-len(one), min(one)))]
    return f"{len(bundles)} bundles at once on {device}: trials {' | '.join(parts)}"


def measured(facts: dict[str, Any]) -> RenderableType | None:
    """The measurements, a row for each signature, device type and kind: the way, the best count, and the reason."""
    if not facts["measured"]:
        return None
    several = len({one["type"] for one in facts["measured"] if one["type"]}) > 1
    table = _table()
    table.add_column("signature", no_wrap=True)
    if several:
        table.add_column("device", no_wrap=True)
    table.add_column("way", no_wrap=True)
    table.add_column("at most", justify="right", style="bold", no_wrap=True)
    table.add_column("because", overflow="fold")
    for one in facts["measured"][:MEASURED]:
        where = [one["type"]] if several else []
        way = one["way"] or "distributed"  # a measurement without a way is of a trial on several devices
        table.add_row(one["signature"][:8], *where, way, _at_most(one["size"], one["kind"]), one["reason"])
    if (more := len(facts["measured"]) - MEASURED) > 0:
        table.add_row(*[""] * (3 + several), Text(f"and {more} more: see --json", style="dim"))
    return table


def _at_most(size: int, kind: Kind) -> str:
    """The count that pays: trials or bundles that share a device, devices of one trial, or threads of a CPU.

    >>> _at_most(4, "sharing"), _at_most(1, "scaling"), _at_most(3, "packing")
    ('4 trials', '1 device', '3 bundles')
    """
    noun = {"scaling": "device", "packing": "bundle", "threads": "thread"}.get(kind, "trial")
    return f"{size} {noun}" if size == 1 else f"{size} {noun}s"


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows as they are, with a column for each key of the first."""
    table = _table()
    for name, one in rows[0].items():
        number = isinstance(one, int | float) or str(one)[:1].isdecimal()
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(str(one) for one in row.values()))
    return table


def study_list(studies: Sequence[dict[str, Any]]) -> RenderableType:
    """One row a study; the row of a study whose log cannot be read says why."""
    table = _table()
    table.add_column("study", style="bold", no_wrap=True)
    table.add_column("task")
    table.add_column("algorithm")
    table.add_column("trials", justify="right", no_wrap=True)
    table.add_column("best", style="green")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("ended")
    for facts in studies:
        if "error" in facts:
            table.add_row(facts["name"], "", "", "", Text(facts["error"], style="red"))
            continue
        begun = f"{(facts['surrogates'] or facts)['begun']}/{facts['total']}"
        best = value(facts["best"]["metrics"][facts["metric"]]) if facts["best"] else "none"
        best = f"{facts['metric']} {best}"
        algorithm, used = facts["algorithm"].split("(")[0], clock(facts["seconds"])
        table.add_row(facts["name"], facts["task"], algorithm, begun, best, used, ending(facts))
    return table


def curves(history: History, trials: Sequence[TrialRecord]) -> RenderableType:
    """The metric's curve, one line a trial, all on one scale."""
    metric = history.metric
    seen = [row[metric] for trial in trials for row in trial.curve if metric in row and abs(row[metric]) < float("inf")]
    low, high = (min(seen), max(seen)) if seen else (0.0, 0.0)
    table = _table()
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column(f"{metric}, {value(low)} to {value(high)}", no_wrap=True)
    table.add_column("first", justify="right", no_wrap=True)
    table.add_column("best", justify="right", style="bold green", no_wrap=True)
    table.add_column("last", justify="right", no_wrap=True)
    for trial in trials:
        values = [row.get(metric, float("nan")) for row in trial.curve]
        best = value(trial.metrics[metric])
        table.add_row(str(trial.number), spark(values, low, high), value(values[0]), best, value(values[-1]))
    return table


def failures(history: History) -> Text | None:
    """How many trials failed, and the last line of the first error."""
    failed = [trial for trial in history.trials if trial.status == "failed"]
    if not failed:
        return None
    why = (failed[0].error or "").strip().splitlines()[-1:]
    return Text(
        f"{len(failed)} of {len(history.trials)} trials failed; trial {failed[0].number}: {''.join(why)}", "red"
    )


def busy(facts: dict[str, Any]) -> Text:
    """How busy the devices were."""
    devices = "1 device" if facts["devices"] == 1 else f"{facts['devices']} devices"
    return Text(f"{devices}, busy {facts['utilisation']:.0%} of {clock(facts['seconds'])}\n", style="dim")


def how_to_go_on(facts: dict[str, Any], config: Config) -> Text:
    """The path of the trained model, lines that load it, and further commands; lines to copy are not wrapped."""
    text = Text()
    if facts["model"] and facts["kind"] == "function":
        text.append("The best report's state is in ").append(facts["model"], style="bold").append("; to load it:\n")
        text.append(f"    import torch; state = torch.load({facts['model']!r})\n\n", style="cyan")
    elif facts["model"]:
        text.append("The trained model is in ").append(facts["model"], style="bold").append("; to load it:\n")
        lines = [f"model = study.task.model({config!r})", f"model.load_state_dict(torch.load({facts['model']!r}))"]
        if facts["file"]:
            lines.insert(0, f"import torch; {_import(Path(facts['file']))}")
        text.append("".join(f"    {line}\n" for line in lines) + "\n", style="cyan")
    dir, name = Path(facts["dir"]).parent, shlex.quote(facts["name"])
    where = "" if dir == Path(".penstock") else f" --dir {shlex.quote(str(dir))}"
    ways = {
        f"penstock show {name}{where} --curves": "where it stands, best trials, curves",
        f"penstock dashboard {name}{where}": "plots in a browser",
        f"penstock report {name}{where}": "which trial had which device when, as a page",
        f"penstock export {name}{where} --to csv": "all trials and curves; or --to tensorboard",
    }
    if facts["ended"] == "deadline" and facts["deadline"] is None:  # it is the plan's
        ways[f"penstock resume {name}{where} --late finish"] = "go on past the plan's deadline"
    elif facts["ended"] == "deadline":
        ways[f"penstock resume {name}{where} --deadline {2 * facts['deadline']:g}s"] = "go on, with more time"
    elif facts["ended"] == "target":
        ways[f"penstock resume {name}{where} --target VALUE"] = "go on, to a better value"
    width = max(map(len, ways))
    text.append("To look further:")
    for command, what in ways.items():
        text.append(f"\n    {command:{width}}", style="cyan").append(f"  {what}", style="dim")
    return text


def spark(values: Sequence[float], low: float, high: float, width: int = 40) -> str:
    """Values as bars between low and high; at most ``width`` of them, evenly chosen, the last one included.

    >>> spark([0.0, 0.5, 1.0, float("nan")], 0, 1)
    '▁▅█×'
    """
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    span = (high - low) or 1.0
    return "".join(BARS[round((v - low) / span * 7)] if low <= v <= high else "×" for v in values)


def _import(file: Path) -> str:
    """A line of Python that gives a file's study; a file whose name cannot be imported is run.

    >>> _import(Path("tune.py")), _import(Path("my-tune.py"))
    ('from tune import study', "import runpy; study = runpy.run_path('my-tune.py')['study']")
    """
    if file.stem.isidentifier():
        return f"from {file.stem} import study"
    return f"import runpy; study = runpy.run_path({str(file)!r})['study']"


def _table() -> Table:
    return Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", show_edge=False)


def _if(template: str, one: object) -> str:
    return "" if one is None else template.format(one)


def _total(facts: dict[str, Any]) -> list[Text]:
    """How many trials there are to be; beside surrogates that is not known, and a recurring job counts recurrences."""
    if facts.get("runs"):
        return [Text(f"in {facts['total']} recurrences", style="dim")]
    return [] if facts["surrogates"] else [Text(f"of {facts['total']}", style="dim")]


def _surrogates(facts: dict[str, Any]) -> str:
    """What a study's surrogates are, on one line."""
    one = facts["surrogates"]
    if one.get("without"):
        return f"none: {one['without']}"
    said = f"{one['begun']} of {facts['total']}, {one['scale']} times narrower; {one['targets']} targets"
    return "; ".join(filter(None, (said, one["rank"], one["fallback"])))


def _best(facts: dict[str, Any]) -> Text:
    if facts["best"] is None:
        return Text("none has reported a finite result", style="yellow")
    best = facts["best"]
    text = Text(f"{facts['metric']} {value(best['metrics'][facts['metric']])}", style="bold green")
    return text.append(f" (trial {best['number']})  {short(best['config'])}", style="not bold default")
