"""The generated block of each cause's and rule's page: how it is detected, in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import cast

from kneewatch.agent.settings.table import BENCHMARK
from kneewatch.collector.names.dcgm_fields import field_table
from kneewatch.collector.names.vllm_metrics import metric_table
from kneewatch.collector.packaged import packaged_tables
from kneewatch.collector.signals.table import GPU_SIGNALS, VLLM_SIGNALS
from kneewatch.dashboards.prometheus.rule_files import alert_group
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan
from kneewatch.diagnose.causes import availability
from kneewatch.diagnose.causes.evidence import CONCLUDED_FROM, DOUBTFUL_BELOW, chance
from kneewatch.diagnose.causes.record import (
    CauseRecord,
    Computed,
    Finds,
    Form,
    Say,
    Term,
    Tested,
)
from kneewatch.diagnose.fleet import outliers, routers, routing
from kneewatch.diagnose.learned import derived_signals
from kneewatch.diagnose.ranking import BY_ID, CAUSES
from kneewatch.diagnose.slow_quantities import SLOW, STEPS, WORK, SlowQuantity
from kneewatch.diagnose.verdict import SYMPTOMS
from kneewatch.rules.conditions import (
    ALWAYS,
    LARGER,
    OPPOSITE,
    QUOTIENT,
    SQUARE_ROOT,
    Assume,
    Check,
    Compare,
    Condition,
    Every,
    FirstOf,
    Formula,
    Known,
    Not,
    Number,
    Quantity,
    Some,
    nodes,
)
from kneewatch.rules.facts import Targets
from kneewatch.rules.library import BENCHMARK_LOAD, RULES, slo_rules
from kneewatch.rules.quantities import (
    BaselineValue,
    Configured,
    Live,
    Minimum,
    Recent,
    Target,
    Watched,
    WindowSeconds,
)
from kneewatch.rules.rule import HOUR_S, Guard, Rule

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
CAUSE_SECTIONS = (
    "Stop-gap now",
    "Fix",
    "Confirm it, and check that it worked",
    "What not to do",
    "Meaning",
    "Impact",
    "False positives",
    "How it is detected",
)
RULE_SECTIONS = ("Meaning", "How it is detected", "What to do", "Related causes")

SETTING_RULES = slo_rules(ttft_p99_s=1.0, itl_p99_s=1.0, benchmark=dict.fromkeys(BENCHMARK, 1.0))
"""Rules that exist only with a latency target or a benchmark in the settings."""

FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "routing_dilution": routing.routing_dilution,
    "replica_imbalance": outliers.replica_imbalance,
    "router_fault": routers.router_faults,
    "mixed_tiers": routing.mixed_tiers,
    "bad_node": outliers.bad_nodes,
    "cold_replica": outliers.cold_replicas,
    "target_down": availability.unreadable,
    "metrics_missing": availability.metrics_missing,
}
"""Causes that a function concludes from more than one engine's facts."""

EVIDENCE_TERMS: Mapping[str, tuple[Term, ...]] = {"bad_node": outliers.TERMS}


def reference_pages() -> dict[str, str]:
    """Each cause's and rule's page with its block filled, by its path."""
    blocks = {f"docs/causes/{record.id}.md": cause_block(record) for record in CAUSES}
    blocks |= {f"docs/rules/{rule.id}.md": rule_block(rule) for rule in (*RULES, *SETTING_RULES)}
    pages: dict[str, str] = {}
    for path, block in blocks.items():
        page = ROOT / path
        lacks_page = page.stem in BY_ID and not page.exists()
        pages[path] = filled(draft(BY_ID[page.stem]) if lacks_page else page.read_text(), block)
    return pages


def draft(record: CauseRecord) -> str:
    """The page of a cause that has none: what its record says, for a person to go on from."""
    say, lever = (
        sentence(text) if isinstance(text, str) else f"{record.title}."
        for text in (record.forms[0].say, record.forms[0].lever)
    )
    texts = {"Stop-gap now": f"1. {lever}", "Fix": f"- {lever}", "Meaning": say}
    parts = [f"## {name}\n\n{texts.get(name, 'Not written yet.')}" for name in CAUSE_SECTIONS[:-1]]
    head = f"# {record.id}: {_lower(record.title)}\n\n{record.title}."
    return "\n\n".join([head, *parts, f"## {CAUSE_SECTIONS[-1]}\n\n{BEGIN}\n{END}"]) + "\n"


def filled(page: str, block: str) -> str:
    """The page with `block` between its two marks.

    Raises:
        ValueError: a mark is missing.
    """
    head, _, rest = page.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise ValueError(f"no {BEGIN} and {END} in {page.splitlines()[0]!r}")
    return f"{head}{BEGIN}\n{block}\n{END}{tail}"


def page_problems(page: str, sections: Iterable[str]) -> list[str]:
    """Sections that a page lacks, and metrics on it that collector/names does not know."""
    headings = set(re.findall(r"(?m)^## (.+)$", page))
    missing = [f"section {name!r} is missing" for name in sections if name not in headings]
    return missing + [f"no such metric: {name}" for name in unknown_metrics(page)]


def unknown_metrics(page: str) -> list[str]:
    """Names of vLLM's or DCGM's metrics on a page that collector/names does not know."""
    table, dcgm = metric_table(), field_table().names
    families = {name for metric in table.metrics.values() for name in metric.names}
    vllm = families | table.samples.keys()
    names = set(re.findall(r"\bvllm:(\w+)", page))
    unknown = [f"vllm:{name}" for name in names if name not in vllm]
    unknown += [name for name in set(re.findall(r"\bDCGM_FI_\w+", page)) if name not in dcgm]
    return sorted(unknown)


# --- Causes ---------------------------------------------------------------------------------------


def cause_block(record: CauseRecord) -> str:
    """The generated block of a cause's page: facts, and folded what it is concluded from."""
    parts: list[str] = []
    for number, form in enumerate(record.forms, 1):
        if len(record.forms) > 1:
            parts.append(f"**Variant {number}: {_lower(form.summary)}**")
        parts.append(form_block(form))
    function = record.judge or FUNCTIONS.get(record.id)
    if function is not None:
        parts.append(function_block(function))
    if record.id in EVIDENCE_TERMS:
        parts += evidence_lists(EVIDENCE_TERMS[record.id])
    fold = '<details markdown="1">\n<summary>Conditions, evidence and severity</summary>'
    return "\n\n".join(["\n".join(facts_list(record)), fold, *parts, "</details>"])


def form_block(form: Form) -> str:
    """A form's gate, evidence and severities."""
    stretched = any(isinstance(node, Check) and node.stretch for node in nodes(form))
    times = " (times grow with a window above 60 s)" if stretched else ""
    severities = [
        f"- `{severity.word}`, if:\n" + "\n".join(bullets(when, "    "))
        for severity, when in form.levels
    ]
    severities.append(f"- `{form.severity.word}`")
    parts = [
        f"It is considered only if{times}:",
        "\n".join(bullets(form.gate)),
        f"Confidence starts at {chance(form.start.value):.0%}. Evidence counts half at its "
        "threshold and in full at twice the threshold (at half of it, if lower is stronger). The "
        f"cause is reported from {CONCLUDED_FROM:.0%} on, as `info` below {DOUBTFUL_BELOW:.0%}.",
        *evidence_lists(form.terms),
        "Severity, the first that applies:",
        "\n".join(severities),
    ]
    return "\n\n".join(parts)


def evidence_lists(terms: Iterable[Term]) -> list[str]:
    """Evidence for a cause, against it and for information, strongest first: what the reader sees,
    the value with its threshold, and when it counts."""
    ordered = sorted(terms, key=lambda term: -abs(term.weight.value))
    groups = (
        ("Evidence for it", [term for term in ordered if term.weight.value > 0]),
        ("Evidence against it", [term for term in ordered if term.weight.value < 0]),
        ("Shown only", [term for term in ordered if not term.weight.value]),
    )
    return [
        "\n".join([f"{name}:\n", *map(evidence_row, members)])
        for name, members in groups
        if members
    ]


def evidence_row(term: Term) -> str:
    """A list item with a piece of evidence."""
    name = quantity(term.value)
    if isinstance(term.signal, str) and term.signal and f"`{term.signal}`" not in name:
        name = f"`{term.signal}`: {name}"
    if term.threshold is not None:
        name += f" {'below' if term.below else 'above'} {quantity(term.threshold)}"
    words = ": ".join(filter(None, (weight(term.weight.value), sentence(term.say), name)))
    return f"- {words}" + ("" if term.when == ALWAYS else f", if {inline(term.when)}") + "."


def weight(log_odds: float) -> str:
    """A weight in words; empty for what is only shown."""
    size = abs(log_odds)
    return "" if not size else "strong" if size >= 1.5 else "medium" if size >= 0.7 else "weak"


def sentence(say: Say) -> str:
    """What a term's sentence looks like; empty where a function writes it."""
    if not isinstance(say, str):
        return ""
    units = {"%": "N%", ".1%": "N%", "ms": "N ms", "s": "N s"}
    return re.sub(r"{\w+(?::([^}]*))?}", lambda field: units.get(field[1] or "", "N"), say)


def function_block(function: Callable[..., object]) -> str:
    """What a function that concludes a cause reads, and its thresholds."""
    plain = cast(FunctionType, function)
    names, texts = references(plain)
    module = plain.__globals__
    numbers = {
        name: module[name]
        for name in names
        if name.isupper() and isinstance(module.get(name), int | float)
    }
    signals = [text for text in texts if text in HELP]
    text = " ".join((plain.__doc__ or "").split("\n\n")[0].split())
    lines = [f"Concluded by a function, not by weights alone: {_lower(text)}"]
    if signals:
        lines.append("Signals it reads: " + ", ".join(f"`{signal}`" for signal in signals) + ".")
    if numbers:
        bounds = ", ".join(
            f"{name.lower().replace('_', ' ')} {value:g}" for name, value in numbers.items()
        )
        lines.append(f"Its numbers: {bounds}.")
    return "\n\n".join(lines)


def trend_help(slow: SlowQuantity) -> dict[str, str]:
    """The help texts of a slow quantity's trend, by the keys of its signals."""
    minutes, hours = slow.span_s / 60, STEPS * slow.span_s / HOUR_S
    quantity = WORK_WORDS if slow is WORK else slow.signal
    return {
        slow.level: f"{FOLDS[slow.fold]} {quantity} of the last {minutes:.0f} minutes",
        slow.before: f"{slow.level} of {hours:.0f} hours before, by a line through its values",
        slow.growth: f"growth of {slow.level} over {hours:.0f} hours, by that line",
        slow.straight: f"share of the variance of {slow.level} that the line explains",
        slow.late: f"newest step of {slow.level}, of {minutes:.0f} minutes, over the line's",
    }


FOLDS = {"min": "lowest", "avg": "mean"}
WORK_WORDS = "running_avg times a request's mean tokens (prompt and answer)"
DERIVED_HELP = {key: text for slow in SLOW for key, text in trend_help(slow).items()} | {
    key: text.format(**vars(derived_signals))
    for group in packaged_tables("diagnose", "derived_signals.toml").values()
    for key, text in group.items()
}
HELP = {s.key: s.help for s in (*VLLM_SIGNALS, *GPU_SIGNALS)} | DERIVED_HELP
"""What each signal measures, by its key."""


def references(function: FunctionType) -> tuple[list[str], list[str]]:
    """Global names and strings that a function uses, also by way of its module's functions."""
    names: dict[str, None] = {}
    texts: dict[str, None] = {}
    done: set[str] = set()
    ahead = [function]
    while ahead:
        current = ahead.pop(0)
        if current.__name__ in done:
            continue
        done.add(current.__name__)
        for code in codes(current.__code__):
            names |= dict.fromkeys(code.co_names)
            texts |= dict.fromkeys(strings(code.co_consts))
        for name in names:
            other = function.__globals__.get(name)
            if isinstance(other, FunctionType) and other.__module__ == function.__module__:
                ahead.append(other)
    return list(names), list(texts)


def codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def strings(constants: Iterable[object]) -> Iterator[str]:
    """The strings among constants, also in tuples."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from strings(cast("tuple[object, ...]", constant))


def facts_list(record: CauseRecord) -> list[str]:
    """Times, what follows, and which alerts are exported, as a list."""
    onset_s, clear_s = record.onset_s.value, record.clear_s.value
    begins = f"once it has held for {onset_s:g} s" if onset_s else "at once"
    ends = f"once it has not held for {clear_s:g} s" if clear_s else "as soon as it does not hold"
    ends += ", or at once where it has surely ended" if record.over is not None else ""
    lines = [f"- Reported {begins}; ends {ends}."]
    if record.fleet:
        lines.append("- Concluded from more than one engine's page, or by the observer.")
    above = [other.id for other in CAUSES if record.id in other.explains]
    roots = ", ".join(str(at) for at, form in enumerate(record.forms, 1) if form.root)
    rows = (
        ("Reported under it", [cause_link(other) for other in dict.fromkeys(record.explains)]),
        (
            f"Reported under its variant {roots}, with all that they explain",
            [cause_link(other) for other in dict.fromkeys(record.heads)],
        ),
        ("It is reported under", [cause_link(other) for other in above]),
        ("Covers the rules", [rule_link(rule) for rule in dict.fromkeys(record.covers)]),
        (
            "Slow tokens on a replica with one of these are not its node's",
            [cause_link(other.id) for other in CAUSES if other.slows_tokens]
            if record.id == "bad_node"
            else [],
        ),
        ("Symptoms", [each.words for each in SYMPTOMS.values() if record.id in each.causes]),
        ("Levers, best first", [f"`{lever}`" for lever in record.levers]),
    )
    lines += [f"- {name}: {', '.join(values)}." for name, values in rows if values]
    return [*lines, f"- {exported('cause', record.id)}"]


def exported(label: str, about: str) -> str:
    """The exported alerts about a cause or a rule."""
    alerts = alert_group(Plan(targets=Targets(1.0, 1.0))).rules
    names = [a.name for a in alerts if isinstance(a, Alert) and a.labels.get(label) == about]
    if not names:
        return "No exported alert: only kneewatch concludes it."
    return f"Exported alerts: {', '.join(f'`{name}`' for name in dict.fromkeys(names))}."


def cause_link(cause: str) -> str:
    """A link from a cause's page to another cause's."""
    return f"[{cause}]({cause}.md)" if cause in BY_ID else f"`{cause}`"


def rule_link(rule: str) -> str:
    """A link from a cause's page to a rule's."""
    return f"[{rule}](../rules/{rule}.md)"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text


# --- Conditions and quantities in words -----------------------------------------------------------


SIGNS = {">=": "is at least", ">": "is above", "<=": "is at most", "<": "is below"}


def bullets(condition: Condition, indent: str = "") -> list[str]:
    """A condition as nested list items."""
    tree = _tree(condition, side=True, unknown=False)
    items = tree[1] if isinstance(tree, tuple) and tree[0] == "all" else [tree]
    return [line for item in items for line in _items(item, indent)]


_Tree = str | tuple[str, list["_Tree"]]


def _items(tree: _Tree, indent: str) -> Iterator[str]:
    if isinstance(tree, str):
        yield f"{indent}- {tree}"
        return
    yield f"{indent}- {tree[0]} of:"
    for item in tree[1]:
        yield from _items(item, indent + "    ")


def inline(condition: Condition) -> str:
    """A condition in one line."""
    return _inline(_tree(condition, side=True, unknown=False))


def _inline(tree: _Tree, *, inside: bool = False) -> str:
    if isinstance(tree, str):
        return tree
    word = " and " if tree[0] == "all" else " or "
    text = word.join(_inline(item, inside=True) for item in tree[1])
    return f"({text})" if inside else text


def _tree(condition: Condition, *, side: bool, unknown: bool) -> _Tree:
    """Where a condition is true, or with `side` false where it is false, as text or as a list of
    all or any; with `unknown` also where it is unknown."""
    match condition:
        case Every(()):
            return "always" if side else "never"
        case Every(parts) | Some(parts):
            kind = "all" if isinstance(condition, Every) == side else "any"
            items: list[_Tree] = []
            for part in parts:
                tree = _tree(part, side=side, unknown=unknown)
                items += tree[1] if isinstance(tree, tuple) and tree[0] == kind else [tree]
            return (kind, items) if len(items) > 1 else items[0]
        case Not(part):
            return _tree(part, side=not side, unknown=unknown)
        case Assume(part, assumed):
            return _tree(part, side=side, unknown=assumed == side)
        case Compare(left, sign, right):
            sign = sign if side else OPPOSITE[sign]
            text = f"{quantity(left)} {SIGNS[sign]} {quantity(right)}"
            return f"{text} (or unknown)" if unknown else text
        case Known(of):
            return f"{quantity(of)} is {'known' if side else 'unknown'}"
        case Check(_, of, for_s, _):
            text = f"{_inline(_tree(of, side=True, unknown=False))} for {for_s.value:g} s"
            return text if side else f"not ({text})"
        case Configured(label, value):
            return f"`{label}` is {'' if side else 'not '}`{value}` in `cache_config_info`"
        case Watched(windows):
            time = "1 window" if windows.value == 1 else f"{windows.value:g} windows"
            return f"the engine was observed for {'at least' if side else 'less than'} {time}"
        case Finds(rule):
            return f"rule {rule_link(rule)} is {'active' if side else 'not active'}"
        case Tested():
            return condition.means if side else f"not ({condition.means})"
        case availability.Stalled(whole):
            least = "" if whole else f" ({availability.STALL_NOTED_S:g} s with a short window)"
            span = f"{availability.STALLED_S:g} s{least}, or `prefill_silence_s` where longer"
            text = (
                f"requests were in flight for {span}; no token was generated, no request "
                "finished and no prefill went further than those before it"
            )
            return text if side else f"not ({text})"
        case _:
            raise TypeError(f"no words for {type(condition).__name__}")


WORDS = {LARGER: "max({}, {})", SQUARE_ROOT: "sqrt({})"}
SPELLED = {QUOTIENT: "{0} / {1}"}


def quantity(value: Quantity, *, inside: bool = False) -> str:
    """A quantity in words, signals by their keys."""
    match value:
        case Number(number):
            return f"{number:g}"
        case Live(key):
            return f"`{key}`"
        case Recent(key):
            return f"recent `{key}`"
        case BaselineValue(key):
            return f"the baseline of `{key}`"
        case Target(name):
            return f"the target `slo.{name}`"
        case WindowSeconds(share):
            return "the window (s)" if share == 1 else f"{share:g} x the window (s)"
        case FirstOf((of, Number(default))):
            # An unknown value that counts as 0 is what a reader expects.
            inner = quantity(of, inside=inside)
            return f"{inner} (unknown: {default:g})" if default else inner
        case Formula(form, parts) if form in WORDS:
            return WORDS[form].format(*map(quantity, parts))
        case Formula(form, parts):
            text = SPELLED.get(form, form).format(*(quantity(part, inside=True) for part in parts))
            return f"({text})" if inside else text
        case Minimum(left, right):
            return f"min({quantity(left)}, {quantity(right)})"
        case FirstOf(options):
            first, *others = (quantity(option) for option in options)
            return first + "".join(f", if unknown {other}" for other in others)
        case Computed():
            return value.means
        case _:
            raise TypeError(f"no words for {type(value).__name__}")


# --- Rules ----------------------------------------------------------------------------------------


def rule_block(rule: Rule) -> str:
    """The generated block of a rule's page."""
    side = "below" if rule.below else "above"
    lines = [f"- Signal: `{rule.signal}`, {signal_help(rule.signal)}"]
    for bound in rule.bounds:
        times, plus = ("" if rule.times == 1 else f"{rule.times:g}x "), rule.plus
        value = f"{bound.threshold:g}"
        if rule.setting:
            value = f"{times}`{rule.setting}`{f' less {-plus:g}' if plus else ''}"
        lines.append(f"- `{bound.severity.word}` {side} {value}.")
    held = f"for {rule.for_s:g} s" if rule.for_s else "at the first scrape"
    back = f"{rule.clear_ratio:.0%} inside the bound" if rule.clear_ratio else "inside the bound"
    lines.append(
        f"- Starts if the bound is crossed {held}. Ends if the value was {back} for "
        f"{rule.clear_s:g} s. Times are for a window of 60 s and scale with it."
    )
    guards = [guard_words(guard) for guard in rule.guards if guard.signal != "arrival_per_s"]
    if len(guards) < len(rule.guards):
        guards.append(f"`arrival_per_s` is within 20% of `{BENCHMARK_LOAD}`")
    if guards:
        lines.append(f"- Judged only while {'; '.join(guards)}.")
    covering = [record.id for record in CAUSES if rule.id in record.covers]
    if covering:
        links = ", ".join(f"[{cause}](../causes/{cause}.md)" for cause in covering)
        lines.append(f"- Not reported by itself beside the causes that cover it: {links}.")
    if rule.setting:
        load = f" with `{BENCHMARK_LOAD}`" if rule.setting in BENCHMARK else ""
        lines.append(f"- Exists only if the setting is stated{load}.")
    limit = f" `{rule.limit}` is the limit to set." if rule.limit else ""
    advice = f"- {rule.advice}{limit}"
    lines += [f"- {exported('rule', rule.id)}", "", "## What to do", "", advice]
    return "\n".join(lines)


def guard_words(guard: Guard) -> str:
    """A guard in words."""
    return f"`{guard.signal}` is at {'most' if guard.below else 'least'} {guard.value:g}"


def signal_help(key: str) -> str:
    """A signal's help text as the rest of a sentence."""
    text = HELP.get(key, "")
    return _lower(text).rstrip(".") + "." if text else "see the signals."
