import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from reports_factory import CASE, COUNTEREXAMPLE, end_record, run_record, verdict, write, write_records

from blackswan.falsifiers.runner.plugin import EXIT_NOTHING_HELD
from blackswan.reports import markdown, page, words
from blackswan.reports.__main__ import main
from blackswan.reports.records import STATES, identity, read
from blackswan.reports.summary import NOTHING_HELD, Summary, document, summarise

HOSTILE = "<script>alert(1)</script> | [x](javascript:x) `a` **b** \\| <img src=x onerror=y> & \"q\" 'q'\n# H $z$ \x1b[31m\u202e"
KNOWN = {"reason": "slow", "expiry": "2099-01-01"}


def summary(path: Path, *verdicts: dict[str, Any], end: bool = True, **header: Any) -> Summary:
    return summarise(read(write(path / "run.jsonl", *verdicts, header=run_record(**header), end=end)))


class Tags(HTMLParser):
    """Opens and closes of a page, its attributes and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.names: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert tags.stack == []
    return tags


@pytest.mark.parametrize(
    ("states", "result"),
    [
        (["HELD"], "HELD: 1 held"),
        (["HELD", "NOT_RUN"], "HELD: 1 held, 1 not run"),
        (["NOT_RUN", "NOT_RUN"], "NOTHING RAN: 2 not run"),
        ([], "NOTHING RAN: no verdicts"),
        (["HELD", "VACUOUS"], "VACUOUS: 1 vacuous, 1 held"),
        (["HELD", "FLAKY", "VACUOUS"], "FLAKY: 1 flaky, 1 vacuous, 1 held"),
        (["HELD", "VACUOUS", "FALSIFIED"], "FALSIFIED: 1 falsified, 1 vacuous, 1 held"),
    ],
)
def test_overall_result(tmp_path: Path, states: list[str], result: str) -> None:
    found = summary(tmp_path, *(verdict(f"C-{place}", state) for place, state in enumerate(states)))
    assert found.headline == result
    assert markdown.render(found).splitlines()[0] == f"# Blackswan: {result}"


def test_interrupted_run_has_not_held(tmp_path: Path) -> None:
    found = summary(tmp_path, verdict(), end=False)
    assert found.headline == "INTERRUPTED: 1 held"
    for text in (markdown.render(found), page.render(found)):
        assert "the run was interrupted: the file has no end record" in text
        assert "did not finish" in text
    assert document(found)["interrupted"] is True
    assert summary(tmp_path, verdict(state="FALSIFIED"), end=False).headline == "FALSIFIED: 1 falsified, interrupted"


@pytest.mark.parametrize(
    ("verdicts", "status", "headline"),
    [
        ([verdict()], 0, "HELD: 1 held"),
        ([verdict()], 1, "FAILED: 1 held, exit status 1, which no verdict explains"),
        ([verdict(), verdict("N", "NOT_RUN")], 3, "FAILED: 1 held, 1 not run, exit status 3, which no verdict explains"),
        ([verdict(state="FALSIFIED", known_failure=KNOWN)], 1, "FAILED: 1 falsified, exit status 1, which no verdict explains"),
        ([verdict(state="FALSIFIED", known_failure=KNOWN)], 0, "KNOWN FAILURES ONLY: 1 falsified"),
        ([verdict(state="FALSIFIED", known_failure=KNOWN)], NOTHING_HELD, "KNOWN FAILURES ONLY: 1 falsified"),
        (
            [verdict("K", "FALSIFIED", known_failure=KNOWN), verdict("H")],
            NOTHING_HELD,
            "FAILED: 1 falsified, 1 held, exit status 5, which no verdict explains",
        ),
        ([verdict(state="FALSIFIED"), verdict("H")], 1, "FALSIFIED: 1 falsified, 1 held"),
        ([verdict(state="NOT_RUN")], 5, "NOTHING RAN: 1 not run"),
        ([], 1, "NOTHING RAN: no verdicts"),
    ],
)
def test_a_run_that_failed_without_a_failing_verdict_has_not_held(
    tmp_path: Path, verdicts: list[dict[str, Any]], status: int, headline: str
) -> None:
    end = end_record(*verdicts, exit_status=status)
    file = write_records(tmp_path / "run.jsonl", run_record(), *verdicts, end)
    found = summarise(read(file))
    assert found.headline == headline
    for text in (markdown.render(found), parsed(page.render(found)).text):
        assert headline.partition(":")[0] in text
    assert EXIT_NOTHING_HELD == NOTHING_HELD


def test_not_run_is_counted_by_reason_and_never_as_held(tmp_path: Path) -> None:
    reasons = ["no CUDA device", "no CUDA device", "package liger is not installed"]
    skipped = [verdict(f"N-{place}", "NOT_RUN", reason=reason) for place, reason in enumerate(reasons)]
    found = summary(tmp_path, verdict("H"), verdict("F", "FLAKY", reason="held the second time"), *skipped)
    assert found.counts["HELD"] == 1
    assert found.not_run == [("no CUDA device", 2), ("package liger is not installed", 1)]
    text = markdown.render(found)
    assert "| no CUDA device | 2 |" in text
    rows = [line for line in text.splitlines() if line.startswith("| N-")]
    assert len(rows) == 3
    assert all("**not run**" in row and " held" not in row for row in rows)
    assert "✓" not in next(line for line in page.render(found).splitlines() if "<b>N-0</b>" in line)


def test_what_rounding_hides_is_said_where_a_claim_holds(tmp_path: Path) -> None:
    both = [verdict("OP-RMSNORM", dtype=dtype) for dtype in ("float32", "bfloat16")]
    found = summary(tmp_path, *both, verdict("OP-LINEAR", "FALSIFIED", dtype="bfloat16"), verdict("OF-OTHERS", dtype="bfloat16"))
    assert {(claim, dtype) for claim, dtype, _ in found.hidden} == {("OP-RMSNORM", "bfloat16")}
    for text in (markdown.render(found), parsed(page.render(found)).text):
        assert "Hidden by rounding" in text
        assert "Mean square and root computed in bfloat16." in text
    assert "Hidden by rounding" not in markdown.render(summary(tmp_path, both[0]))


def test_counts_of_contracts(tmp_path: Path) -> None:
    verdicts = [verdict(f"C-{state}", state) for state in STATES] + [verdict("OTHER", contract="lora")]
    text = markdown.render(summary(tmp_path, *verdicts))
    assert "| cuda-forward-parity 1.0.0 | 1 | 1 | 1 | 1 | 1 | 25 | 3.75 s |" in text
    assert "| lora 1.0.0 | 1 | 0 | 0 | 0 | 0 | 0.71 | 0.75 s |" in text
    assert "| **all** | **2** | **1** | **1** | **1** | **1** |  | 4.50 s |" in text


def test_falsified_claim_is_shown_in_full_and_first(tmp_path: Path) -> None:
    found = summary(tmp_path, verdict("HOLDS"), verdict("A", "FALSIFIED", severity="P2"), verdict("BROKEN", "FALSIFIED"))
    assert [entry.verdict["claim"] for entry in found.falsified] == ["BROKEN", "A"], "the most severe first"
    for text in (markdown.render(found), re.sub(r"<[^>]+>", " ", page.render(found))):
        assert text.index("BROKEN") < text.index("HOLDS")
    tables = markdown.render(found)
    assert "rows=2, hidden=64; eps=1e-06; flavour outliers; seed 7; digest dddddddddddd" in tables
    assert "y\\[1, 3\\]: expected 1.25, got 1.5" in tables
    assert "rms error 0.25 against a limit of 0.01, 25 times too large; 32 ulp; cosine 0.98" in tables
    assert "rms\\_norm at model.layers.0.input\\_layernorm: equals the reference with epsilon 1e-5" in tables
    assert "(mutant rms\\_norm\\_eps\\_hard\\_coded, distance 3e-07)" in tables
    command = str(COUNTEREXAMPLE["replay"])
    assert f"- **Replay**: `{command}`\n" in tables
    assert f"<code>{escape(command)}</code>" in page.render(found)


@pytest.mark.parametrize(
    ("expiry", "result", "remark"),
    [("2025-03-01", "KNOWN FAILURES ONLY", "known failure until 2025-03-01: slow"), ("2025-02-28", "FALSIFIED", "expired on 2025-02-28")],
)
def test_known_failure_excuses_until_its_expiry(tmp_path: Path, expiry: str, result: str, remark: str) -> None:
    found = summary(tmp_path, verdict(state="FALSIFIED", known_failure={"reason": "slow", "expiry": expiry}))
    assert found.result == result
    assert remark in markdown.render(found)


@pytest.mark.parametrize("state", ["VACUOUS", "FLAKY"])
def test_known_failure_excuses_no_other_state(tmp_path: Path, state: str) -> None:
    assert summary(tmp_path, verdict(state=state, known_failure={"reason": "slow", "expiry": "2099-01-01"})).result == state


def test_known_failure_that_held_needs_attention(tmp_path: Path) -> None:
    found = summary(tmp_path, verdict(known_failure={"reason": "slow", "expiry": "2099-01-01"}))
    assert "it held: remove the entry" in markdown.render(found)
    assert "it held: remove the entry" in page.render(found)


def test_hostile_text_stays_text_in_html(tmp_path: Path) -> None:
    hostile = dict.fromkeys(("claim", "statement", "contract", "contract_version", "operation", "dtype", "device", "reason"), HOSTILE)
    counterexample = {**COUNTEREXAMPLE, "tensor": HOSTILE, "expected": HOSTILE, "replay": HOSTILE, "flavour": HOSTILE}
    written = [verdict(**{**hostile, "state": state}) for state in ("NOT_RUN",)]
    written += [verdict(**{**hostile, "claim": "F" + HOSTILE, "counterexample": counterexample}, state="FALSIFIED")]
    harmless = parsed(page.render(summary(tmp_path, verdict(), verdict("F", "FALSIFIED"))))
    text = page.render(summary(tmp_path, *written, command=HOSTILE, device_name=HOSTILE, subject=HOSTILE))
    tags = parsed(text)
    assert tags.names <= harmless.names
    assert {name for name, _ in tags.attributes} <= {name for name, _ in harmless.attributes}
    assert "<script>alert(1)</script>" in tags.text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_page_loads_nothing(tmp_path: Path) -> None:
    tags = parsed(page.render(summary(tmp_path, *(verdict(f"C-{state}", state) for state in STATES))))
    assert not tags.names & {"script", "link", "img", "iframe", "object"}
    links = [value or "" for name, value in tags.attributes if name in ("href", "src")]
    assert links
    assert all(link.startswith("#") for link in links)
    assert "url(" not in tags.text
    assert "@import" not in tags.text


def test_hostile_text_stays_text_in_markdown(tmp_path: Path) -> None:
    hostile = verdict(HOSTILE, "NOT_RUN", statement=HOSTILE, contract=HOSTILE, reason=HOSTILE)
    text = markdown.render(summary(tmp_path, hostile, command=HOSTILE))
    assert "<script" not in text
    assert "<img" not in text
    assert not re.search(r"(?<!\\)\[x", text)
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if line.startswith("# ")] == ["# Blackswan: NOTHING RAN: 1 not run"]


def test_every_row_of_a_table_has_as_many_cells(tmp_path: Path) -> None:
    text = markdown.render(summary(tmp_path, verdict("A|B", "NOT_RUN", statement="a | b", reason="x || y"), verdict("\\", statement="\\|")))
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines}) <= 1


@pytest.mark.parametrize(("text", "span"), [("a|b", "`a|b`"), ("a`b", "`` a`b ``"), ("``", "``` `` ```")])
def test_code_span_holds_backticks(text: str, span: str) -> None:
    assert markdown.code(text) == span


def test_nan_is_the_worst_headroom(tmp_path: Path) -> None:
    broken = verdict("NAN", "FALSIFIED", headroom={"worst": "nan", "metric": "max", "tensor": "y"})
    found = summary(tmp_path, broken, verdict())
    assert words.worst(found.falsified[0].verdict) == float("inf")
    assert "nan max of y" in markdown.render(found)
    assert "nan max of y" in page.render(found)
    written = json.loads(json.dumps(document(found), allow_nan=False))
    assert written["contracts"][0]["worst_headroom"] == "inf"


def bars(text: str) -> list[float]:
    """Lengths of the headroom bars, in per cent."""
    return [float(width) for width in re.findall(r'<rect class="(?:part|over)" width="([\d.]+)"', text)]


def test_bars_end_at_their_headroom(tmp_path: Path) -> None:
    held = [verdict(f"C-{value}", headroom={"worst": value, "metric": "rms", "tensor": "y"}) for value in (0, 0.5, 1)]
    assert bars(page.render(summary(tmp_path, *held))) == [0, 35, 70]
    beyond = verdict(state="FALSIFIED", headroom={"worst": "inf", "metric": "rms", "tensor": "y"})
    assert bars(page.render(summary(tmp_path, beyond))) == [100]


def test_stale_verdicts_are_marked(tmp_path: Path) -> None:
    run = read(write(tmp_path / "run.jsonl", verdict("OLD"), verdict("NEW")))
    found = summarise(run, {identity(run.verdicts[0]): "the claim has changed"})
    assert found.headline == "STALE: 2 held, 1 STALE"
    rows = {line.split(" ")[1]: line for line in markdown.render(found).splitlines() if line.startswith(("| OLD", "| NEW"))}
    assert "**STALE**" in rows["OLD"]
    assert "STALE" not in rows["NEW"]
    assert 'title="the claim has changed">STALE<' in page.render(found)
    assert [entry["stale"] for entry in document(found)["contracts"][0]["verdicts"]] == [None, "the claim has changed"]


def test_order_of_the_records_does_not_matter(tmp_path: Path) -> None:
    verdicts = [verdict(f"C-{place}", state) for place, state in enumerate(STATES)]
    one, other = summary(tmp_path, *verdicts), summary(tmp_path, *reversed(verdicts))
    for render in (markdown.render, page.render):
        assert render(one) == render(other)
    assert document(one)["contracts"] == document(other)["contracts"]


def test_what_a_record_does_not_say_is_left_out() -> None:
    structure: Any = {
        **COUNTEREXAMPLE,
        "tensor": "loss",
        "index": [],
        "error": None,
        "limit": None,
        "metric": "shape (2, 3) instead of (3, 2)",
    }
    assert words.element(structure) == "loss: expected 1.25, got 1.5"
    assert words.excess(structure) == "shape (2, 3) instead of (3, 2)"
    assert words.case({**CASE, "scalars": {}, "digest": None, "seed": None}) == "rows=2, hidden=64; flavour outliers"  # type: ignore[typeddict-item]
    assert words.case(None) == "–"


def test_render_writes_pages_named_like_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "gpu.jsonl", verdict())
    assert main(["render", str(file), "--output", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu.html", "gpu.json", "gpu.md"]
    assert capsys.readouterr().out.startswith("HELD: 1 held\n")
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert main(["render", str(file), "--output", str(tmp_path / "out")]) == 0
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert json.loads(first["gpu.json"])["totals"]["HELD"] == 1


@pytest.mark.parametrize("name", ["md", "json", "html"])
def test_render_never_writes_over_the_verdict_file(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / f"run.{name}", verdict())
    before = file.read_bytes()
    assert main(["render", str(file), "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert main(["render", str(file), "--output", str(tmp_path / "out")]) == 0
    assert file.read_bytes() == before


@pytest.mark.parametrize("name", ["md", "json", "html"])
def test_render_replaces_pages_only(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "README.jsonl", verdict())
    own = tmp_path / "out" / f"README.{name}"
    own.parent.mkdir()
    page_of_its_own = {
        "md": "# Blackswan",
        "json": '{\n "result": "HELD"}',
        "html": '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Own',
    }
    for content in ("# Somebody's own\n", page_of_its_own[name], 'own # Blackswan: \n "headline": " <title>Blackswan: '):
        own.write_text(content)
        assert main(["render", str(file), "--output", str(own.parent)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{own}: is no page of a report" in error
        assert [path.name for path in own.parent.iterdir()] == [own.name]
        assert own.read_text() == content
    own.write_text("")
    assert main(["render", str(file), "--output", str(own.parent)]) == 0, "nobody misses an empty file"


def test_render_writes_the_format_asked_for(tmp_path: Path) -> None:
    file = write(tmp_path / "run.jsonl", verdict())
    assert main(["render", str(file), "--output", str(tmp_path / "out"), "--format", "md"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.md"]


def test_bad_input_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_records(tmp_path / "run.jsonl", run_record(), verdict(state="PASSED"), end_record())
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.md").write_text("# Blackswan: before")
    assert main(["render", str(file), "--output", str(out)]) == 2
    assert (out / "run.md").read_text() == "# Blackswan: before"
    assert [path.name for path in out.iterdir()] == ["run.md"]
    assert f"{file}:2" in capsys.readouterr().err


def test_output_that_is_a_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "run.jsonl", verdict())
    assert main(["render", str(file), "--output", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
    assert read(file).verdicts


def test_failed_write_leaves_the_old_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "run.jsonl", verdict())
    assert main(["render", str(file), "--output", str(tmp_path / "out")]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "chmod", full)
    write(file, verdict(state="FALSIFIED"))
    assert main(["render", str(file), "--output", str(tmp_path / "out")]) == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
