"""What a validation found is kept as a file that anybody can read, line by line."""

from __future__ import annotations

import json

import pytest

from pipeline.errors import ConfigError
from pipeline.store.format.cache_layout import REPORTS
from pipeline.store.format.disk import Disk
from pipeline.store.maintenance.damage_report import (
    Checked,
    DamageFinding,
    Fault,
    ReportWriter,
    Summary,
    last_report,
    read_report,
    reports,
)
from tests.store.maintenance.damage import overwrite

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


def test_a_report_reads_back_as_it_was_written_line_by_line(tmp_path):
    path, summary = written(tmp_path)
    report = read_report(path)
    assert list(report.findings()) == FINDINGS
    assert report.summary == summary
    assert summary.faults == {"index": 1, "record": 2}
    assert (summary.findings, summary.lost) == (3, 1)
    first, *lines = path.read_text().splitlines()
    assert json.loads(first)["how"] == "full"
    assert [json.loads(line)["fault"] for line in lines] == ["index", "record", "record"]
    overwrite(path, first.strip().ljust(16_383).encode() + b"\n" + "".join(f"{line}\n" for line in lines).encode())
    assert list(read_report(path).findings()) == FINDINGS  # a summary may be longer
    many = [DamageFinding("scan", Fault.RECORD, "x" * 500, "s", f"{number:032x}") for number in range(5_000)]
    for findings in ([], many):
        path, _ = written(tmp_path / "others", findings)
        assert list(read_report(path).findings()) == findings


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


def test_what_is_no_report_is_refused(tmp_path):
    odd = ('{"report": 99, "how": "full"}', '{"report": 1, "x": 1}', '{"report": 1, "how": 1}',
           '{"report": 1, "how": "full", "begun": Infinity}', '{"report": 1, "how": "full", "notes": []}')  # fmt: skip
    for text in ("", "{}", "[]", "no JSON", *odd):
        (tmp_path / "list").write_text(text)
        with pytest.raises(ConfigError):
            read_report(tmp_path / "list")
    with pytest.raises(ConfigError):
        read_report(tmp_path / "not there")


FINDING = {"kind": "a", "fault": "gone", "what": "", "shard": "", "key": "", "lost": False}
ODD = [{"fault": "no such"}, {"fault": ["gone"]}, {"shard": ["a"]}, {"kind": None}, {"key": "xyz"}, {"key": 5},
       {"what": {}}, {"lost": "yes"}, {"more": 1}]  # fmt: skip


def test_a_line_that_cannot_be_read_is_refused_when_it_is_reached(tmp_path):
    path, _ = written(tmp_path, FINDINGS[:1])
    content = path.read_bytes()
    for line in ("{", "{}", "[]", '{"kind": 1}', *(json.dumps(FINDING | odd) for odd in ODD)):
        overwrite(path, content + f"{line}\n".encode())
        findings = read_report(path).findings()
        assert next(findings) == FINDINGS[0]
        with pytest.raises(ConfigError, match="line"):
            next(findings)


def test_the_last_report_is_the_newest_validation_that_can_be_read(tmp_path):
    assert last_report(Disk(), tmp_path) is None
    for year in (2020, 2021):
        written(tmp_path / REPORTS, name=f"{year}0101T000000Z-a.jsonl")
    written(tmp_path / REPORTS, name="20220101T000000Z-a.jsonl", how="repair")  # what that has lost is no validation
    written(tmp_path / REPORTS, name="20990101T000000Z-a.jsonl", begun=4e9)  # of a clock that ran ahead
    (tmp_path / REPORTS / "20230101T000000Z-a.jsonl").write_text("cut")
    (tmp_path / REPORTS / "20240101T000000Z-a.partial").write_text("unfinished")
    assert last_report(Disk(), tmp_path).path.name == "20210101T000000Z-a.jsonl"
    assert [one.summary.how for one in reports(Disk(), tmp_path)].count("repair") == 1


def test_a_summary_that_is_too_long_takes_no_room_of_the_findings(tmp_path):
    noted = Summary("full")
    noted.note({"Traceback: " + "x" * 20_000 + "\nmore": 2, "one\ntwo": 1, "one\nthree": 1})
    assert [(len(what), number) for what, number in noted.notes.items()] == [(200, 2), (3, 2)]
    noted.note({f"{number} {'ä' * 190}": 1 for number in range(100)})
    rooted = Summary("full", root="ä" * 3000, stay={"ö" * 200 + str(number): "x" for number in range(5)})
    for summary in (noted, rooted):
        writer = ReportWriter(Disk(), tmp_path)
        writer.add(*FINDINGS)
        report = read_report(writer.publish(summary))
        assert list(report.findings()) == FINDINGS
        assert (report.summary.how, report.summary.notes, report.summary.root, report.summary.stay) == (
            "full",
            {},
            "",
            {},
        )


def test_parts_of_a_validation_add_up():
    whole, parts = Summary("full"), [Summary("full", begun=3.0), Summary("full", begun=2.0)]
    for part, finding in zip(parts, FINDINGS[1:], strict=True):
        part.take(Checked("graph", finding.shard, 10, (b"k",), (finding,), {"recomputed": 2}))
        whole.add(part)
    assert (whole.begun, whole.bytes, whole.shards, whole.records, whole.whole, whole.lost) == (2.0, 20, 2, 4, 2, 1)
    assert whole.kinds == {"graph": {"records": 4, "whole": 2, "lost": 1}}
    assert (whole.faults, whole.notes) == ({"record": 2}, {"recomputed": 4})
