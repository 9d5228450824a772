"""What a validation found is kept as a file that anybody can read, line by line."""

from __future__ import annotations

import json

import pytest

from pipeline.errors import ConfigError
from pipeline.store.format.cache_layout import REPORT_NAME, REPORTS, unique_stem
from pipeline.store.format.disk import Disk
from pipeline.store.maintenance.damage_report import (
    SUMMARY_BYTES,
    Checked,
    DamageFinding,
    Fault,
    ReportWriter,
    Summary,
    last_report,
    read_report,
    reports,
)

FINDINGS = [
    DamageFinding("scan", Fault.INDEX, "the index's head is damaged"),
    DamageFinding("graph", Fault.RECORD, 'odd "text"\n✓', "a.safetensors", "00" * 16, lost=True),
    DamageFinding("graph", Fault.RECORD, "again", "b.safetensors", "00" * 16),
]


def written(folder, findings=FINDINGS, name="", how="full", begun=5.0):
    summary = Summary(how, begun=begun)
    writer = ReportWriter(Disk(), folder)
    for one in findings:
        summary.count(one)
        writer.add(one)
    return writer.publish(summary, name), summary


def test_a_report_reads_back_as_it_was_written(tmp_path):
    path, summary = written(tmp_path)
    report = read_report(path)
    assert list(report.findings()) == FINDINGS
    assert report.summary == summary
    assert summary.faults == {"index": 1, "record": 2}
    assert (summary.findings, summary.lost) == (3, 1)


def test_every_line_is_json_of_its_own(tmp_path):
    path, _ = written(tmp_path)
    summary, *lines = path.read_text().splitlines()
    assert json.loads(summary)["how"] == "full"
    assert [json.loads(line)["fault"] for line in lines] == ["index", "record", "record"]


def test_a_report_of_nothing_is_a_report(tmp_path):
    path, _ = written(tmp_path, [])
    assert list(read_report(path).findings()) == []
    assert path.stat().st_size == SUMMARY_BYTES


def test_a_report_longer_than_any_buffer_reads_back(tmp_path):
    many = [DamageFinding("scan", Fault.RECORD, "x" * 500, "s", f"{number:032x}") for number in range(5_000)]
    path, _ = written(tmp_path, many)
    assert list(read_report(path).findings()) == many


def test_a_report_with_a_name_replaces_the_one_of_that_name(tmp_path):
    written(tmp_path, name="list.jsonl")
    path, _ = written(tmp_path, [], name="list.jsonl")
    assert [one.name for one in tmp_path.iterdir()] == ["list.jsonl"]
    assert list(read_report(path).findings()) == []


def test_an_unfinished_report_leaves_nothing(tmp_path):
    writer = ReportWriter(Disk(), tmp_path)
    writer.add(FINDINGS[0])
    writer.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", "[]", "no JSON", '{"report": 99, "how": "full"}', '{"report": 1, "x": 1}',
    '{"report": 1, "how": 1}', '{"report": 1, "how": "full", "begun": Infinity}',
    '{"report": 1, "how": "full", "notes": []}'])  # fmt: skip
def test_what_is_no_report_is_refused(tmp_path, text):
    (tmp_path / "list").write_text(text)
    with pytest.raises(ConfigError, match="no damage list"):
        read_report(tmp_path / "list")


def test_a_report_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_report(tmp_path / "list")


FINDING = {"kind": "a", "fault": "gone", "what": "", "shard": "", "key": "", "lost": False}
ODD = [{"fault": "no such"}, {"fault": ["gone"]}, {"shard": ["a"]}, {"kind": None}, {"key": "xyz"}, {"key": 5},
       {"what": {}}, {"lost": "yes"}, {"more": 1}]  # fmt: skip


@pytest.mark.parametrize("line", ["{", "{}", "[]", '{"kind": 1}', *(json.dumps(FINDING | odd) for odd in ODD)])
def test_a_line_that_cannot_be_read_is_refused_when_it_is_reached(tmp_path, line):
    path, _ = written(tmp_path, FINDINGS[:1])
    path.chmod(0o644)
    with path.open("a") as file:
        file.write(line + "\n")
    findings = read_report(path).findings()
    assert next(findings) == FINDINGS[0]
    with pytest.raises(ConfigError, match="line"):
        next(findings)


def test_the_last_report_is_the_newest_that_can_be_read(tmp_path):
    assert last_report(Disk(), tmp_path) is None
    for name in ("20200101T000000Z-a.jsonl", "20210101T000000Z-a.jsonl"):
        written(tmp_path / REPORTS, name=name)
    (tmp_path / REPORTS / "20220101T000000Z-a.jsonl").write_text("cut")
    (tmp_path / REPORTS / "20230101T000000Z-a.partial").write_text("unfinished")
    assert last_report(Disk(), tmp_path).path.name == "20210101T000000Z-a.jsonl"


def test_a_list_of_what_a_repair_has_lost_is_no_validation(tmp_path):
    written(tmp_path / REPORTS, name="20200101T000000Z-a.jsonl")
    written(tmp_path / REPORTS, name="20210101T000000Z-a.jsonl", how="repair")
    assert last_report(Disk(), tmp_path).path.name == "20200101T000000Z-a.jsonl"
    assert [one.summary.how for one in reports(Disk(), tmp_path)] == ["repair", "full"]


def test_a_report_by_a_clock_that_ran_ahead_does_not_stay_the_last_one(tmp_path):
    written(tmp_path / REPORTS, name="20990101T000000Z-a.jsonl", begun=4e9)
    written(tmp_path / REPORTS, name="20210101T000000Z-a.jsonl", begun=1.6e9)
    written(tmp_path / REPORTS, name="20210102T000000Z-a.jsonl", begun=1.5e9)
    assert last_report(Disk(), tmp_path).path.name == "20210101T000000Z-a.jsonl"


def test_notes_that_are_long_or_many_take_no_room_of_the_findings(tmp_path):
    summary = Summary("full")
    summary.note({"Traceback: " + "x" * 20_000 + "\nmore": 2, "one\ntwo": 1, "one\nthree": 1})
    assert [(len(what), number) for what, number in summary.notes.items()] == [(200, 2), (3, 2)]
    summary.note({f"{number} {'ä' * 190}": 1 for number in range(100)})
    writer = ReportWriter(Disk(), tmp_path)
    writer.add(*FINDINGS)
    report = read_report(writer.publish(summary))
    assert list(report.findings()) == FINDINGS
    assert (report.summary.how, report.summary.notes) == ("full", {})


@pytest.mark.parametrize(
    "name", ["20261122T105052Z-0a3f-validate.jsonl", f"{unique_stem()}.jsonl"], ids=["task", "command"]
)
def test_reports_of_tasks_and_of_commands_are_known_by_their_names(name):
    assert REPORT_NAME.fullmatch(name)
    assert not REPORT_NAME.fullmatch(name.replace("Z-", "Z-../"))


def test_parts_of_a_validation_add_up():
    whole, parts = Summary("full"), [Summary("full", begun=3.0), Summary("full", begun=2.0)]
    for part, finding in zip(parts, FINDINGS[1:], strict=True):
        part.take(Checked("graph", finding.shard, 10, (b"k",), (finding,), {"recomputed": 2}))
        whole.add(part)
    assert (whole.begun, whole.bytes, whole.shards, whole.records, whole.whole, whole.lost) == (2.0, 20, 2, 4, 2, 1)
    assert whole.kinds == {"graph": {"records": 4, "whole": 2, "lost": 1}}
    assert (whole.faults, whole.notes) == ({"record": 2}, {"recomputed": 4})


def test_a_list_with_a_longer_first_line_is_read_too(tmp_path):
    path, summary = written(tmp_path)
    first, rest = path.read_bytes().split(b"\n", 1)
    path.chmod(0o644)
    path.write_bytes(first.ljust(16_383) + b"\n" + rest)
    assert read_report(path).summary == summary
    assert list(read_report(path).findings()) == FINDINGS


def test_a_summary_that_is_too_long_leaves_out_what_files_stay_and_of_which_cache_it_is(tmp_path):
    summary = Summary("full", root="ä" * 3000, stay={"ö" * 200 + str(number): "x" for number in range(5)})
    writer = ReportWriter(Disk(), tmp_path)
    writer.add(*FINDINGS)
    report = read_report(writer.publish(summary))
    assert list(report.findings()) == FINDINGS
    assert (report.summary.root, report.summary.stay) == ("", {})
