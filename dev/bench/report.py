"""Writes the results as one page with pictures, compared with the goals, the peers and the last recorded results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dev.bench import results as stored
from dev.bench.goals import GOALS, Results, changes, comparable, named, steady
from dev.bench.watching import say

Result = Mapping[str, Any]

_CHANGES = {
    "known_key": "known grouping key",
    "new_key": "new grouping key, with its history",
    "cold_key": "new grouping key, without history",
    "list": "a value of a list of a million",
}


def write(baseline: Path | None = None) -> Path:
    """Writes RESULTS.md beside the folder of results and the pictures into it. Says what regressed."""
    folder = stored.RESULTS
    now = stored.load(folder)
    before = stored.load(baseline) if baseline is not None else stored.committed()
    pictures = _pictures(named(now.values()), folder) if now else []
    page = folder.with_suffix(".md")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(now, before, [f"{folder.name}/{name}" for name in pictures]), encoding="utf-8")
    for change in changes(before, now):
        if change.verdict == "regressed":
            say(f"REGRESSED {change.name} {change.what}: {change.before:,.6g} -> {change.now:,.6g}")
    say(f"Wrote {page.name}, {len(now)} results")
    return page


def render(now: Results, before: Results, pictures: Sequence[str] = ()) -> str:
    """Returns the page."""
    by_name = named(now.values())
    sections = [
        ("Goals", _goals(by_name)),
        ("Shapes", _shapes(by_name)),
        ("Throughput", _drains(by_name)),
        ("Backtests", _backtests(by_name)),
        ("What-if", _what_ifs(by_name)),
        ("Other engines", _peers(by_name)),
        ("Latency", _latencies(by_name)),
        ("Rule changes", _rule_changes(by_name)),
        ("Warm start", _warm_starts(by_name)),
        ("State", _states(by_name)),
        ("Memory", _memory(by_name)),
        ("Where a steady batch spends its time", _steps(by_name)),
        ("Against the last recorded results", _changes(before, now)),
        ("Pictures", "\n\n".join(f"![{Path(name).stem}]({name})" for name in pictures)),
        ("Commands", _commands(by_name)),
    ]
    written = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections if text)
    return f"# Results\n\n{_header(now)}\n\n{written}\n"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; empty without rows. The first column to the left, the others to the right."""
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|", *lines])


def number(value: float | None, digits: int = 3) -> str:
    """A figure as it is read: whole from 100 on, else with three digits that count; a dash for none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{digits}g}"


def _header(now: Results) -> str:
    machines = {
        f"{r['machine']['cores']} cores ({r['machine']['processor']}), {r['machine']['memory_gib']} GiB, "
        f"Python {r['versions'].get('python')}, Java {r['versions'].get('java')}, "
        f"PySpark {r['versions'].get('pyspark')}, Delta {r['versions'].get('delta-spark')}"
        for r in now.values()
    }
    commits = sorted(
        {f"{r['git'].get('commit', 'unknown')[:8]}{'+' if r['git'].get('changed') else ''}" for r in now.values()}
    )
    return (
        "Written by `python -m dev.bench report` from the JSON files beside it, which hold more. "
        f"{'; '.join(sorted(machines))}. Commits: {', '.join(commits)} (+: with changes)."
    )


def _goals(now: Results) -> str:
    rows = []
    for goal in GOALS:
        value = goal.value(now)
        verdict = "not measured" if value is None else "reached" if goal.reached(value) else "**missed**"
        bound = f"{'at least' if goal.at_least else 'at most'} {number(goal.bound)}"
        rows.append((goal.what, f"{bound} {goal.unit}", number(value), verdict))
    return table(("what", "goal", "measured", ""), rows)


def _of(now: Results, *parts: str) -> list[tuple[str, Result]]:
    return [(name, result) for name, result in now.items() if result["part"] in parts]


def _shapes(now: Results) -> str:
    rows = [
        (
            shape,
            f"{number(each['value'])} {each['unit']}",
            number(each["ratio"]),
            each["against"],
            number(each["bound"]),
        )
        for _, result in _of(now, "shapes")
        for shape, each in result["figures"]["shapes"].items()
    ]
    return table(("shape", "value", "times", "against", "at most"), rows)


def _drains(now: Results) -> str:
    rows = []
    for _, result in _of(now, "drain"):
        figures, settings = result["figures"], result["settings"]
        spread = figures.get("steady_spread")
        rows.append(
            (
                f"{settings['set']}, {settings['rules']}{_on_workers(settings)}",
                settings["rule_count"],
                figures["features"],
                f"{figures['events']:,}",
                number(steady(result)),
                "-" if spread is None else f"{spread:.0%}",
                figures["steady_batches"],
                number(figures["cold_events_per_s"]),
                f"{figures['alerts']:,}",
            )
        )
    head = (
        "set, rules",
        "rules",
        "features",
        "events",
        "steady events/s",
        "spread",
        "batches",
        "cold total events/s",
        "alerts",
    )
    note = "Spread: the middle half of the single batches' rates, over their median. Cold total: from start to end, first batch included.\n\n"
    return note + table(head, rows) if rows else ""


def _backtests(now: Results) -> str:
    rows = []
    for _, result in _of(now, "backtest"):
        figures, settings = result["figures"], result["settings"]
        drain = now.get(f"drain-{_set(settings['set'])}-{settings['rules']}")
        limit = now.get(f"peer-oneshot-polars-{_set(settings['set'])}") if settings["rules"] == "2" else None
        rate, cold = figures["events_per_s"], None if drain is None else drain["figures"]["cold_events_per_s"]
        rows.append(
            (
                f"{settings['set']}, {settings['rules']}",
                f"{figures['events']:,}",
                f"{figures['alerts']:,}",
                number(rate),
                number(cold),
                number(rate / cold if cold else None),
                number(None if drain is None else steady(drain)),
                number(None if limit is None or not comparable(limit) else steady(limit)),
            )
        )
    head = (
        "set, rules", "events", "rows of alerts", "backtest events/s", "drain events/s", "times", "steady drain events/s",
        "one-shot polars events/s",
    )  # fmt: skip
    note = (
        "From start to end, first batch included, but for the steady drain. The one-shot query has all events in memory, "
        "answers these two rules alone and keeps nothing: the limit.\n\n"
    )
    return note + table(head, rows) if rows else ""


def _what_ifs(now: Results) -> str:
    rows = []
    for _, result in _of(now, "what-if"):
        figures, settings = result["figures"], result["settings"]
        what = f"{settings['set']}, {settings['variants']} values of {settings['varied']}"
        seconds = (number(figures["one_processor_s"]), number(figures["many_processor_s"]), number(figures["ratio"]))
        rows.append((what, f"{figures['events']:,}", *seconds))
    return table(("set, variants", "events", "processor s, one variant", "all of them", "times"), rows)


def _on_workers(settings: Mapping[str, Any]) -> str:
    workers = settings.get("workers")
    return f", {workers} workers of a core" if workers else ""


def _peers(now: Results) -> str:
    rows = []
    for _, result in _of(now, "peer"):
        settings, figures = result["settings"], result["figures"]
        ours = now.get(f"drain-{_set(settings['set'])}-2")
        label = f"{_set(settings['set'])}: {settings['peer']} {settings['variant']}"
        durable = "yes" if settings["durable"] else "no"
        if "steady_events_per_s" not in figures:
            rows.append((label, durable, "-", "-", figures["outcome"], "-"))
            continue
        equal = comparable(result)
        times = number(steady(ours) / steady(result)) if equal and ours is not None and steady(result) else "-"
        alerts = f"equal ({figures['comparison']['both']:,})" if equal else "**differ**: no ratio"
        # Not a figure to stand alone: what is fast and wrong is not fast.
        rate = number(steady(result)) if equal else "-"
        rows.append((label, durable, rate, times, figures["outcome"], alerts))
    return table(("set: engine", "durable", "steady events/s", "Lookback over it", "run", "alerts"), rows)


def _latencies(now: Results) -> str:
    rows = [
        (
            *_rate(result),
            *(number(figures[key]) for key in ("p50_ms", "p95_ms", "p99_ms", "max_ms")),
            f"{figures['alerts']:,}",
            number(figures["events_per_s"]),
            number(figures["append_p50_ms"]),
            figures["batches"],
        )
        for _, result in _of(now, "latency")
        for figures in [result["figures"]]
    ]
    head = (
        "events come at",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "worst ms",
        "alerts",
        "came events/s",
        "append p50 ms",
        "batches",
    )
    note = "From the commit of an event to the commit of its alert, both by the modification time of the commit's file.\n\n"
    return note + table(head, [(_rate_in_words(*row[:2]), *row[2:]) for row in sorted(rows)]) if rows else ""


def _rate(result: Mapping[str, Any]) -> tuple[int, str]:
    """Returns the events per second, and how the run differs from the usual one."""
    settings = result["settings"]
    differences = (("plain", ", session of Spark defaults"), ("many", ", 102 rules"))
    return settings["rate"], "".join(words for key, words in differences if settings.get(key))


def _rate_in_words(rate: int, difference: str) -> str:
    return f"{rate:,} events/s{difference}"


def _rule_changes(now: Results) -> str:
    rows = []
    for _, result in _of(now, "changes"):
        figures = result["figures"]
        for what, text in _CHANGES.items():
            if f"{what}_s" in figures:
                times = (number(figures[f"{what}_{key}_s"]) for key in ("p50", "max"))
                rows.append((text, *times, len(figures[f"{what}_s"])))
    note = (
        "From the commit of the change to the commit of the first alert under it; of a list to the commit of its row in "
        "rule_log.\n\n"
    )
    return note + table(("change", "p50 s", "worst s", "changes"), rows) if rows else ""


def _warm_starts(now: Results) -> str:
    rows = []
    for _, result in _of(now, "warm"):
        figures, settings = result["figures"], result["settings"]
        p95 = [number(figures[span]["p95_ms"]) for span in ("before", "meanwhile", "after", "from_then_on")]
        memory = [number(figures.get(f"memory_{what}_gb")) for what in ("before", "meanwhile", "more")]
        rows.append((settings["set"], settings.get("rule", "window"), f"{figures['events']:,}", number(figures["seconds"]), *p95,
                     number(figures["p95_from_then_on_ratio"]), *memory))  # fmt: skip
    head = (
        "set", "rule", "events", "in force after s", "p95 ms before", "meanwhile", "a minute after",
        "both", "both over before", "GB before", "from then on", "more",
    )  # fmt: skip
    note = (
        "From the commit of a rule (window: on a new grouping key, with a sum and a count over 30 days; sequence: three small "
        "payments of a customer, then a large one at another terminal, within 30 days) to the commit of its row `activated`. "
        "The p95 is that of other rules' alerts: in the minute before the rule was published, from its commit to that row, in "
        "the minute after that, and in the last two together; the memory is that of all processes together, in which a page "
        "that they share counts once.\n\n"
    )
    return note + table(head, rows) if rows else ""


def _states(now: Results) -> str:
    rows = []
    for _, result in _of(now, "drain"):
        state = result["figures"]["state"]
        if "page_bytes" in state:
            values = [state[key] for key in ("retained_rows", "page_bytes", "checkpoint_bytes")]
            rates = [
                state[key] for key in ("bytes_per_retained_row", "bytes_per_stored_row", "written_bytes_per_event")
            ]
            rows.append((f"{result['settings']['set']}, {result['settings']['rules']}", *map(number, values + rates)))
    head = (
        "set, rules",
        "rows retained",
        "bytes of pages",
        "bytes of files",
        "per row retained",
        "per row stored",
        "written per event",
    )
    note = "After the last batch. A row is one event in one feature; stored are also those that no window holds and that are not dropped yet.\n\n"
    return note + table(head, rows) if rows else ""


def _memory(now: Results) -> str:
    rows = []
    for _, result in _of(now, "drain", "backtest"):
        memory = result["figures"]["memory"]
        if "workers_peak_mib" in memory:
            peaks = [
                memory[key] for key in ("workers_peak_mib", "largest_worker_peak_mib", "most_workers", "jvm_peak_mib")
            ]
            rows.append((f"{result['name']}", f"{result['figures']['events']:,}", *map(number, peaks)))
    return table(("result", "events", "workers MiB", "largest worker MiB", "workers", "JVM MiB"), rows)


def _steps(now: Results) -> str:
    wanted = ("triggerExecution", "queryPlanning", "walCommit", "addBatch", "run", "shards", "write", "commitOffsets")
    rows = [
        (result["name"], *(number(result["figures"]["step_ms"].get(step)) for step in wanted))
        for _, result in _of(now, "drain", "latency")
        if result["figures"]["step_ms"]
    ]
    note = (
        "Median milliseconds. run, shards and write are parts of addBatch: the query up to its answers, of which the slowest "
        "shard's evaluation, and the writing of alerts.\n\n"
    )
    return note + table(("result", *wanted), rows) if rows else ""


def _changes(before: Results, now: Results) -> str:
    rows = [
        (c.name, c.what, number(c.before), number(c.now), f"{c.worse:+.0%}", f"{c.band:.0%}", c.verdict)
        for c in changes(before, now)
    ]
    return table(("result", "figure", "before", "now", "worse by", "noise", ""), rows)


def _commands(now: Results) -> str:
    return table(("result", "command"), [(result["name"], f"`{result['command']}`") for result in now.values()])


def _peer_label(result: Result) -> str:
    settings = result["settings"]
    return f"{settings['peer']} {settings['variant']}{', durable' if settings['durable'] else ''}"


def _set(stem: str) -> str:
    return stem.partition("-")[0]


def _pictures(now: Results, folder: Path) -> list[str]:
    import matplotlib as mpl  # noqa: PLC0415 - a page without pictures does without

    mpl.use("Agg")
    drawn = {"throughput.png": _draw_throughput, "latency.png": _draw_latency, "state.png": _draw_state}
    return [name for name, draw in drawn.items() if draw(now, folder / name)]


def _figure(width: float = 8.0, height: float = 4.5) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _draw_throughput(now: Results, file: Path) -> bool:
    bars = [
        (f"Lookback, {result['settings']['set']}, {result['settings']['rules']}", steady(result), "#1f6f8b")
        for _, result in _of(now, "drain")
        if steady(result)
    ]
    bars += [
        (
            f"{_peer_label(result)}, {_set(result['settings']['set'])}",
            steady(result),
            "#b5651d" if result["settings"]["durable"] else "#d9b38c",
        )
        for _, result in _of(now, "peer")
        if comparable(result) and steady(result)
    ]
    if not bars:
        return False
    bars.sort(key=lambda bar: bar[1])
    figure, axes = _figure(height=1.2 + 0.24 * len(bars))
    names, rates, colours = zip(*bars, strict=True)
    drawn = axes.barh(names, rates, color=colours)
    axes.bar_label(drawn, labels=[f"{rate:,.0f}" for rate in rates], padding=3, fontsize=7)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel("steady events per second, logarithmic")
    axes.tick_params(axis="y", labelsize=7)
    figure.savefig(file, dpi=90)
    return True


def _draw_latency(now: Results, file: Path) -> bool:
    measured = sorted((_rate(result), result["figures"]["percentiles_ms"]) for _, result in _of(now, "latency"))
    if not measured:
        return False
    figure, axes = _figure()
    for rate, values in measured:
        axes.plot(values, range(1, len(values) + 1), label=_rate_in_words(*rate))
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds from the commit of an event to the commit of its alert")
    axes.set_ylabel("per cent of the alerts")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=90)
    return True


def _draw_state(now: Results, file: Path) -> bool:
    days = {"window-1h": 1 / 24, "window-1d": 1.0, "window-7d": 7.0, "window-30d": 30.0}
    points = sorted(
        (days[result["settings"]["rules"]], state["retained_rows"], state["page_bytes"])
        for _, result in _of(now, "drain")
        for state in [result["figures"]["state"]]
        if result["settings"]["rules"] in days and "page_bytes" in state
    )
    if not points:
        return False
    figure, axes = _figure()
    windows, rows, sizes = zip(*points, strict=True)
    axes.loglog(windows, [size / 1e6 for size in sizes], marker="o", label="pages, MB")
    axes.loglog(windows, [40 * row / 1e6 for row in rows], linestyle=":", label="40 bytes an event")
    axes.set_xlabel("window, days")
    axes.set_ylabel("MB of state")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=90)
    return True
