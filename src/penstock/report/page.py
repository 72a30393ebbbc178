"""A study as one self-contained HTML page: its figures, its timeline, its best trials."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from html import escape
from typing import Any

from penstock.energy.cost import legible
from penstock.log.events import Event
from penstock.log.history import History, TrialRecord
from penstock.log.timeline import available, timeline
from penstock.report.energy import picture
from penstock.report.format import spent, value, visible, width
from penstock.report.ranks import said_fallback, said_rank, said_surrogates
from penstock.report.timeline import draw, end, figures

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2430;--dim:#6b7280;--line:#e3e5ea}
@media(prefers-color-scheme:dark){:root{--paper:#15181f;--ink:#e6e8ee;--dim:#98a0b0;--line:#343a46}}
body{margin:0 auto;max-width:1064px;padding:28px 32px 48px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;font-variant-numeric:tabular-nums}
h1{font-size:24px;margin:0 0 16px;overflow-wrap:anywhere}h2{font-size:17px;margin:36px 0 8px}
dl{display:flex;flex-wrap:wrap;gap:12px 40px;margin:0 0 20px}dt{color:var(--dim);font-size:13px}
dd{margin:0;font-size:20px;font-weight:600;overflow-wrap:anywhere}
svg{display:block;width:calc(100% + 32px);height:auto;margin:0 -16px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:14px}
th,td{padding:5px 18px 5px 0;border-bottom:1px solid var(--line);text-align:left;white-space:nowrap}
th{color:var(--dim);font-weight:500}.number{text-align:right}
""".strip()


def study_page(name: str, events: Sequence[Event], best: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page of a study from its log; ``best`` are rows of its best trials."""
    rows, devices = timeline(events), available(events)
    until = end(events)
    history = History.of(events)
    simulated = {"devices and time": "simulated"} if history.simulated else {}
    cost = {"cost": spent(history.costs)} if history.costs else {}
    narrow = {"surrogates": said_surrogates(history)} if history.surrogates else {}
    energy = {} if history.joules is None else {"energy": legible(history.joules)}
    facts = {**figures(rows, devices, until), **narrow, **cost, **energy, **simulated}
    more = [f"<p>{escape(line)}</p>" for line in (said_rank(history), said_fallback(history)) if line]
    more.append(picture(history))
    return page(name, facts, draw(rows, devices=devices, until=until), best, more)


def best_rows(best: Sequence[TrialRecord]) -> list[dict[str, Any]]:
    """A row for each of the best trials, with its width where some are narrower."""
    rows = [{**trial.row(), "state": trial.standing} for trial in best]
    if any(trial.variant for trial in best):
        both = zip(rows, best, strict=True)
        rows = [{"number": one.number, "scale": None, **row} | {"scale": width(one.scale)} for row, one in both]
    return rows


def page(
    name: str,
    facts: Mapping[str, str],
    svg: str,
    best: Sequence[Mapping[str, Any]] = (),
    more: Sequence[str] = (),
) -> str:
    """One self-contained page: a heading, the facts, a picture, a table with a column for each key of ``best``.

    >>> "<h1>digits</h1>" in page("digits", {"trials": "4"}, "<svg></svg>")
    True
    """
    shown = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(one)}</dd></div>" for key, one in facts.items())
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(name)} · Penstock</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(name)}</h1>",
        f"<dl>{shown}</dl>" if shown else "",
        svg,
        table(best, "Best trials") if best else "",
        *more,
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def table(rows: Sequence[Mapping[str, Any]], heading: str) -> str:
    """Rows as a table; a name without a value in any row is no column."""
    names = dict.fromkeys(name for row in rows for name, one in row.items() if one is not None)
    number = {name: all(isinstance(row.get(name), int | float | None) for row in rows) for name in names}
    side = {name: ' class="number"' if number[name] else "" for name in names}
    head = "".join(f"<th{side[name]}>{escape(_heading(name, names))}</th>" for name in names)
    body = "\n".join(
        f"<tr>{''.join(f'<td{side[name]}>{_cell(row.get(name))}</td>' for name in names)}</tr>" for row in rows
    )
    return f'<h2>{escape(heading)}</h2>\n<div class="wide"><table><tr>{head}</tr>\n{body}\n</table></div>'


def _heading(name: str, names: Container[str]) -> str:
    """A column's name as the command line has it; a parameter with the name of another column stays apart."""
    plain = {"number": "trial", "device_seconds": "device s", "scale": "width"}.get(name, name.removeprefix("config."))
    return name if plain != name and plain in names else plain


def _cell(one: Any) -> str:
    return "" if one is None else escape(visible(value(one)))
