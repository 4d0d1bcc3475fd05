"""docs/sampling.md tells what the sampler does: its tables are held against stages, YAML and SamplingParams."""

import json
import math
import re
import runpy
from dataclasses import asdict, fields

import pytest

from framework import SamplingParams, StructuredOutputsParams
from framework.config import compose
from framework.plugins import registry
from framework.testing.stages import VOCAB_SIZE, context, new_request

from .pages import ROOT, blocks_of

PAGE = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
KINDS = {
    "Masks": "mask", "Elementwise": "elementwise", "Thresholds": "threshold", "Select": "select",
    "Observers": "observe",
}  # fmt: skip
OF_TEXT_AND_ENDINGS = {
    "max_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "detokenize",
    "skip_special_tokens", "output_kind",
}  # fmt: skip
"""Fields of SamplingParams that no stage and no draw reads."""


def tables(page):
    """{heading: rows of the table below it, each as {column: cell}}."""
    found = {}
    for section in re.split(r"^#+ ", page, flags=re.MULTILINE)[1:]:
        lines = [line for line in section.splitlines() if line.startswith("|")]
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] or [[], []]
        found[section.splitlines()[0]] = [dict(zip(head, row, strict=True)) for row in rows]
    return found


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


TABLES = tables(PAGE)
(PICTURE,) = (block.text for block in blocks_of(PAGE) if "the greedy line" in block.text)
STAGES = {
    spec.name: registry().load_target("stage", spec.name)
    for spec in registry().specs("stage")
    if spec.target.startswith("framework_samplers.")
}
ROWS = {quoted(row["stage"])[0]: row for heading in KINDS for row in TABLES[heading]}
FIELDS = {quoted(row["field"])[0]: row for row in TABLES["Fields of SamplingParams"]}
ARGS = {(quoted(row["stage"])[0], quoted(row["name"])[0]): row for row in TABLES["Parameters in extra_args"]}
FULL = [stage.name for stage in compose(["sampler=full"]).sampler.stages]
CONF = ROOT / "conf" / "sampler"
ORDERS = {
    path.stem: int(re.search(r"^order: (\d+)$", path.read_text(encoding="utf-8"), re.MULTILINE)[1])
    for path in (CONF / "stage").glob("*.yaml")
}


def built(name, vocab_size=VOCAB_SIZE, **options):
    target = STAGES[name]
    return target(registry().build_options("stage", name, options), context(target.spec, vocab_size))


def asking(stage, **args):
    return SamplingParams(extra_args={stage: args})


# ------------------------------------------------------------------------------------------------------- stages


def test_every_stage_stands_under_its_kind_in_its_order():
    told = {heading: {quoted(row["stage"])[0]: int(row["order"]) for row in TABLES[heading]} for heading in KINDS}
    true = {
        heading: {name: ORDERS[name] for name, target in STAGES.items() if target.spec.kind == kind}
        for heading, kind in KINDS.items()
    }
    assert told == true


@pytest.mark.parametrize("name", STAGES)
def test_stage_is_asked_for_by_what_it_reads(name):
    spec, told = STAGES[name].spec, quoted(ROWS[name]["asked for by"])
    assert set(told) - {"extra_args"} == {*spec.params, *spec.extra_args}
    assert ("extra_args" in told) == (bool(spec.extra_args) or not spec.params)


def test_picture_of_the_pipeline_has_every_stage_in_its_place():
    told = {name: int(order) for name, order in re.findall(r"(\w+) (\d{3,4})\b", PICTURE) if name in ORDERS}
    assert told == {name: order for name, order in ORDERS.items() if name not in ("gumbel", "greedy")}
    assert "gumbel, greedy or mirostat 1100" in PICTURE
    assert [name for name in re.findall(r"(\w+) \d{3,4}\b", PICTURE) if name in told and name != "mirostat"] == [
        name for name in FULL if name != "gumbel"
    ]


def test_greedy_line_stands_behind_the_last_stage_that_may_change_the_best_token():
    before, _, behind = PICTURE.partition("the greedy line")
    in_place = [name for name in FULL if STAGES[name].spec.kind in ("mask", "elementwise")]
    last = max(place for place, name in enumerate(in_place) if "argmax" not in STAGES[name].spec.caps.keeps)
    assert all(f"{name} {ORDERS[name]}" in before for name in in_place[: last + 1])
    assert all(f"{name} {ORDERS[name]}" in behind for name in in_place[last + 1 :])


def test_capabilities_are_what_the_stages_declare():
    common = frozenset.intersection(*(target.spec.caps.keeps for target in STAGES.values()))
    (sentence,) = re.findall(r"All of ours keep ([^.]+)\.", PAGE)
    assert set(quoted(sentence)) == common
    words = ("argmax", "drafts", "graph_safe")
    told = {quoted(row["stage"])[0]: row for row in TABLES["What stages keep"]}
    assert list(told) == sorted(STAGES, key=lambda name: (ORDERS[name], list(ROWS).index(name)))
    for name, target in STAGES.items():
        kept = {word for word in words if told[name][f"`{word}`"] == "yes"}
        assert kept == target.spec.caps.keeps - common, name
        assert (told[name]["essential"] == "yes") == target.spec.essential, name


def test_stages_that_take_memory_as_they_are_asked_for_are_named():
    (sentence,) = re.findall(r"State as wide as the vocabulary or as a list \(([^)]+)\)", PAGE)
    assert set(quoted(sentence)) == {n for n, t in STAGES.items() if any(f.pooled for f in t.spec.fields)}


def test_pipelines_are_those_that_ship():
    told = {quoted(row["`sampler=`"])[0]: row for row in TABLES["Pipelines"]}
    assert set(told) == {path.stem for path in CONF.glob("*.yaml")}
    assert [name for name, row in told.items() if "(default)" in row["`sampler=`"]] == [compose([]).sampler.name]
    for name, row in told.items():
        stages = [stage.name for stage in compose([f"sampler={name}"]).sampler.stages]
        assert quoted(row["select stage"]) == [one for one in stages if STAGES[one].spec.kind == "select"]
        if name == "full":
            assert row["stages"] == "every stage but greedy and mirostat"
            assert set(stages) == set(STAGES) - {"greedy", "mirostat"}
        else:
            assert row["stages"].split(", ") == stages


# --------------------------------------------------------------------------------------------------- parameters


def ends(values):
    """(accepted, refused) at and beyond the ends of a range, such as (0, 1], [0, inf), 1..128 or -1.. ."""
    if ".." in values:
        low, high = (int(eval(end.replace("^", "**"))) if end else None for end in values.split(".."))
        return [low, *([high] if high else [2**31])], [low - 1, *([high + 1] if high else []), low + 0.5, True]
    low, high = (float(end) for end in values[1:-1].split(","))
    just = {
        "[": ([low], [math.nextafter(low, -math.inf)]), "(": ([math.nextafter(low, math.inf)], [low]),
        "]": ([high], [math.nextafter(high, math.inf)]), ")": ([math.nextafter(high, -math.inf)], [high]),
    }  # fmt: skip
    accepted, refused = (a + b for a, b in zip(just[values[0]], just[values[-1]], strict=True))
    return accepted, [*refused, math.nan, True]


def is_range(cell):
    return bool(quoted(cell)) and re.fullmatch(r"[\[(]\S+, \S+[\])]|-?[\d^]+\.\.\S*", quoted(cell)[0]) is not None


def refuses(action, *args, **kwargs):
    try:
        action(*args, **kwargs)
    except (TypeError, ValueError):
        return True
    return False


def test_every_sampling_field_has_its_row_and_its_default():
    told = {name: quoted(row["default"])[0] for name, row in FIELDS.items()}
    true = {name: repr(value) for name, value in SamplingParams.defaults().items() if name not in OF_TEXT_AND_ENDINGS}
    assert told == true


@pytest.mark.parametrize("name", [name for name, row in FIELDS.items() if is_range(row["values"])])
def test_values_of_a_field_end_where_the_page_says(name):
    accepted, refused = ends(quoted(FIELDS[name]["values"])[0])
    others = {"max_tokens": None} if name == "min_tokens" else {}
    assert [value for value in accepted if refuses(SamplingParams, **{name: value}, **others)] == []
    assert [value for value in refused if not refuses(SamplingParams, **{name: value}, **others)] == []


LISTED = {  # accepted, refused
    "logit_bias": ([{0: 100, 1: -100}], [{0: math.nextafter(100, 101)}, {0: -100.5}, {-1: 0}, [1]]),
    "allowed_token_ids": ([[0]], [[], [-1], "a"]),
    "bad_words": (["a", ["a", "b"]], ["", [1]]),
    "bad_words_token_ids": ([[[1]], [[1, 2], [3]]], [[[]], [1], "a"]),
    "structured_outputs": (
        [{"json_object": True}, {"regex": "a"}, {"choice": ["a"]}],
        [{}, {"regex": "a", "choice": ["a"]}, {"regexp": "a"}],
    ),
    "logprob_token_ids": ([[0, 5]], [[-1], "a"]),
    "stages": ([{"top_p": False, "min_p": True}], [["top_p"], {"top_p": 0}]),
    "extra_args": ([{"xtc": {}}], [["xtc"], {"xtc": 0.5}]),
}


def test_values_that_are_no_range_have_a_test():
    assert {name for name, row in FIELDS.items() if not is_range(row["values"])} == set(LISTED)


@pytest.mark.parametrize("name", LISTED)
def test_lists_and_mappings_are_checked(name):
    accepted, refused = LISTED[name]
    assert [value for value in accepted if refuses(SamplingParams, **{name: value})] == []
    assert [value for value in refused if not refuses(SamplingParams, **{name: value})] == []


@pytest.mark.parametrize(
    "field, most, value",
    [
        ("logit_bias", 1024, lambda n: dict.fromkeys(range(n), 1.0)),
        ("bad_words_token_ids", 8192, lambda n: [[1] * n]),
    ],
)
def test_number_of_ids_ends_where_the_page_says(field, most, value):
    assert re.search(rf"\b{most}\b", FIELDS[field]["values"])
    (name,) = quoted(FIELDS[field]["stage"])
    stage = built(name, vocab_size=2048)
    stage.validate(SamplingParams(**{field: value(most)}))
    assert refuses(stage.validate, SamplingParams(**{field: value(most + 1)}))


def test_structured_outputs_are_all_named():
    assert quoted(FIELDS["structured_outputs"]["values"]) == [field.name for field in fields(StructuredOutputsParams)]


@pytest.mark.parametrize("name", [name for name, row in FIELDS.items() if quoted(row["stage"])])
def test_field_is_read_by_its_stage_and_off_where_the_page_says(name):
    (stage,) = quoted(FIELDS[name]["stage"])
    assert name in STAGES[stage].spec.params
    if STAGES[stage].spec.kind == "select":
        return  # every request that draws needs it

    def is_wanted(value):
        return built(stage).wants(SamplingParams(**{name: value}, stop_token_ids=[1], max_tokens=None))

    assert [value for value in quoted(FIELDS[name]["off at"]) if is_wanted(eval(value))] == []
    values = FIELDS[name]["values"]
    inside = [2] if ".." in values else ends(quoted(values)[0])[0] if is_range(values) else LISTED[name][0]
    assert any(map(is_wanted, inside))


def test_top_k_is_off_from_the_vocabulary_on():
    assert "the vocabulary's size and above" in FIELDS["top_k"]["off at"]
    assert [built("top_k").wants(SamplingParams(top_k=VOCAB_SIZE + more)) for more in (-1, 0, 1)] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("row", TABLES["Sampling"], ids=lambda row: row["to"])
def test_what_the_first_table_asks_for_can_be_asked_for(row):
    for asked in quoted(row["ask for, as in `SamplingParams(...)`"]):
        params = eval(f"SamplingParams({asked})")
        for stage, args in (params.extra_args or {}).items():
            assert set(args) <= set(STAGES[stage].spec.extra_args)
            built(stage).validate(params)


# --------------------------------------------------------------------------------------------------- extra_args

BESIDE = {("dynamic_temperature", "low"): {"high": 100.0}, ("dynamic_temperature", "high"): {"low": 0.0}}
"""What a parameter needs beside it, so that its own range shows."""


def test_every_parameter_of_a_stage_has_its_row():
    assert set(ARGS) == {(name, arg) for name, target in STAGES.items() for arg in target.spec.extra_args}


@pytest.mark.parametrize("stage, name", ARGS)
def test_values_of_a_parameter_end_where_the_page_says(stage, name):
    cell = ARGS[stage, name]["values"]
    if is_range(cell):
        accepted, refused = ends(quoted(cell)[0])
    else:
        (most,) = re.findall(r"up to (\d+) ids", cell)
        accepted, refused = [[0, VOCAB_SIZE - 1], [1] * int(most)], [[1] * (int(most) + 1), [VOCAB_SIZE], [-1], "1"]
    options = {"start": 5, "end": 6} if stage == "thinking_budget" else {}
    one, beside = built(stage, **options), BESIDE.get((stage, name), {})

    def is_refused(value):
        return refuses(one.validate, asking(stage, **{**beside, name: value}))

    assert [value for value in accepted if is_refused(value)] == []
    assert [value for value in refused if not is_refused(value)] == []


def row_of(one, params):
    """What the request's row holds."""
    one.add_request(1, params, new_request(1, params))
    return [one_field.tolist() for one_field in columns(one)]


def columns(one):
    return [column.np[1] for column in vars(one).values() if hasattr(column, "dev")]


@pytest.mark.parametrize("stage, name", ARGS)
def test_parameter_that_is_left_out_is_what_the_page_says(stage, name):
    left_out, others = ARGS[stage, name]["left out"], {"multiplier": 1.0} if stage == "dry" else {}
    if stage == "dynamic_temperature":
        others = {"low": 0.5, "high": 2.0}
    others.pop(name, None)
    if "option" in left_out:
        value = [7] if "those" in left_out else 0.75
        given = {"sequence_breakers" if stage == "dry" else name: value}
        one, explicit = built(stage, **given), value
    elif quoted(left_out):
        one, explicit = built(stage), float(quoted(left_out)[0])
        explicit = int(explicit) if ".." in ARGS[stage, name]["values"] else explicit
    elif left_out == "refused":
        assert refuses(built(stage).validate, asking(stage))
        return
    else:
        assert left_out == "off" and not built(stage).wants(asking(stage))
        return
    one.validate(asking(stage, **others))
    assert columns(one), "the stage keeps something"
    assert row_of(one, asking(stage, **others)) == row_of(one, asking(stage, **others, **{name: explicit}))


@pytest.mark.parametrize("stage, name", [key for key, row in ARGS.items() if quoted(row["off at"])])
def test_parameter_is_off_where_the_page_says(stage, name):
    value = float(quoted(ARGS[stage, name]["off at"])[0])
    assert not built(stage).wants(asking(stage, **{name: value}))


def test_options_are_those_of_the_stages():
    told = {quoted(row["option"])[0]: json.loads(quoted(row["default"])[0]) for row in TABLES["Options"]}
    true = {}
    for name in STAGES:
        options = registry().build_options("stage", name, {})
        true |= {f"sampler.stages.{name}.{key}": value for key, value in (asdict(options) if options else {}).items()}
    assert told == true


# ----------------------------------------------------------------------------------------------- picture, links


def test_picture_of_thresholds_is_what_the_stages_keep():
    drawn = runpy.run_path(str(ROOT / "docs" / "build_thresholds.py"))
    committed = (ROOT / "docs" / "thresholds.svg").read_text(encoding="utf-8")
    assert committed == drawn["picture"](), "run: python docs/build_thresholds.py"
    assert {name for example in drawn["EXAMPLES"] for name in example} == {
        name for name, target in STAGES.items() if target.spec.kind == "threshold"
    }


def test_links_into_pages_lead_to_headings():
    for page, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", PAGE):
        text = PAGE if not page else (ROOT / "docs" / page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
