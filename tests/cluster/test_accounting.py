"""What is read from sacct and squeue, of several versions, whole, cut and garbled; and what a look says in trouble."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from datetime import datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cluster.accounting import (
    JOBS_A_CALL,
    SACCT_COLUMNS,
    AccountedTask,
    Accounting,
    CommandFailed,
    parse_sacct,
)
from pipeline.cluster.job_spec import TaskState
from pipeline.cluster.slurm_words import (
    bytes_of,
    epoch_of,
    exit_of,
    expand,
    is_stuck,
    parse_squeue,
    parse_state,
    seconds_of,
)
from tests.cluster.sacct_texts import (
    RANKS_22_05,
    RECORDED_22_05,
    SQUEUE_22_05,
    WRITTEN_20_11,
    WRITTEN_23_11,
    array_text,
)
from tests.testkit.counted import calls_of

TEXTS = (RECORDED_22_05, RANKS_22_05, WRITTEN_20_11, WRITTEN_23_11)


def jobs_in(text: str) -> set[str]:
    return {line.split("|")[0].split(".")[0].split("_")[0] for line in text.splitlines()}


def rows_of(text: str) -> dict[str, AccountedTask]:
    rows, torn = parse_sacct(text, jobs_in(text))
    assert torn == 0
    return rows


class TestSteps:
    def test_that_ran_out_of_memory_make_a_failed_task_out_of_memory(self) -> None:
        row = rows_of(RECORDED_22_05)["1_1"]
        assert (row.state, row.exit_code, row.signal) == (TaskState.OUT_OF_MEMORY, None, signal.SIGKILL)
        assert row.why == "step 0 ran out of memory"

        assert rows_of(WRITTEN_20_11)["101_7"].state is rows_of(WRITTEN_23_11)["901_3"].state is TaskState.OUT_OF_MEMORY
        for state, code in (("FAILED", "0:125"), ("OUT_OF_MEMORY", "0:0")):
            text = line("5", "FAILED", "1:0") + line("5.batch", "FAILED", "1:0") + line("5.0", state, code)
            assert rows_of(text)["5"].state is TaskState.OUT_OF_MEMORY, (state, code)

    def test_out_of_memory_do_not_hide_what_else_became_of_the_task(self) -> None:
        for state in ("RUNNING", "CANCELLED by 0", "NODE_FAIL", "PREEMPTED", "PENDING"):
            text = line("5", state, "0:0") + line("5.0", "OUT_OF_MEMORY", "0:125")
            assert rows_of(text)["5"].state is parse_state(state)

    def test_tell_the_signal_of_which_the_job_shows_only_a_code(self) -> None:
        rows = rows_of(RECORDED_22_05)
        assert [(rows[job].exit_code, rows[job].signal) for job in ("2", "25", "49_0")] == [
            (None, signal.SIGSEGV),
            (None, signal.SIGKILL),
            (None, signal.SIGTERM),
        ]

    def test_of_slurm_itself_do_not_tell_how_the_worker_ended_nor_does_a_completed_job(self) -> None:
        text = line("5", "FAILED", "1:0") + line("5.0", "FAILED", "1:0") + line("5.extern", "CANCELLED", "0:15")
        assert (rows_of(text)["5"].exit_code, rows_of(text)["5"].signal) == (1, None)
        row = rows_of(WRITTEN_23_11)["903"]
        assert (row.state, row.exit_code) == (TaskState.COMPLETED, 1)

    def test_have_the_peak_wherever_it_was(self) -> None:
        rows = rows_of(RECORDED_22_05 + WRITTEN_20_11)
        assert rows["27_0"].peak_rss_bytes == 3800 << 10
        assert rows["101_7"].peak_rss_bytes == int(15.5 * (1 << 30))
        assert rows["1_1"].peak_rss_bytes is None, "0 is what Slurm writes when it never sampled"


class TestRanks:
    def test_out_of_memory_on_one_node_are_seen_on_several_they_hide_behind_the_highest_code(self) -> None:
        rows = rows_of(RANKS_22_05)
        assert [rows[job].state.value for job in ("13_0", "14_0")] == ["OUT_OF_MEMORY", "FAILED"]
        assert [rows[job].exit_code for job in ("12_0", "13_0", "14_0")] == [76, None, 76]

    def test_of_a_node_count_together(self) -> None:
        step = line("5.0", "COMPLETED", "0:0", rss="3000K", AveRSS="2000K", NTasks="8", NNodes="2")
        row = rows_of(line("5", "COMPLETED", "0:0", NNodes="2") + step)["5"]
        assert row.peak_rss_bytes == 8000 << 10, "8 of 2000K in the mean, on 2 nodes"

    def test_are_on_the_nodes_of_their_step_where_the_job_still_reads_the_first(self) -> None:
        lines = RANKS_22_05.splitlines(keepends=True)
        early = lines[0].replace("ranks-n[1-2]", "ranks-n1") + "".join(lines[1:3])
        assert rows_of(early)["12_0"].node == "ranks-n[1-2]"


class TestRecords:
    def test_of_a_requeued_task_count_and_the_last_one_is_current(self) -> None:
        rows = rows_of(RECORDED_22_05)
        assert (rows["26"].state, rows["26"].signal) == (TaskState.FAILED, signal.SIGUSR2)
        assert rows["26"].before == ((TaskState.REQUEUED, "n3"),)
        assert rows["15"].why == "cancelled by user 0; restarted after NODE_FAIL on n3"
        assert [rows[job].restarts for job in ("26", "15", "27_0")] == [1, 1, 0]

        assert len(rows["26"].steps) == 2, "its last ones"

    def test_out_of_order_are_put_in_order(self) -> None:
        first, again = (
            line("5", "PREEMPTED", "0:0", submit="1700000000"),
            line("5", "PENDING", "0:0", submit="1700000099"),
        )
        assert rows_of(first + again)["5"].state is rows_of(again + first)["5"].state is TaskState.PENDING

    def test_of_the_waiting_rest_of_an_array_stand_for_each_of_its_tasks(self) -> None:
        rows = rows_of(RECORDED_22_05)
        assert {name: row.state.value for name, row in rows.items() if name.startswith("46_")} == {
            "46_0": "RUNNING",
            **{f"46_{task}": "PENDING" for task in range(1, 6)},
        }

    def test_of_a_waiting_rest_never_hide_a_task_that_has_begun(self) -> None:
        rest, begun = line("5_[0-2]", "PENDING", "0:0"), line("5_1", "COMPLETED", "0:0")
        for text in (rest + begun, begun + rest):
            assert [rows_of(text)[f"5_{task}"].state.value for task in range(3)] == ["PENDING", "COMPLETED", "PENDING"]

    def test_of_a_cancelled_rest_say_who_cancelled(self) -> None:
        rows = rows_of(WRITTEN_23_11)
        tasks = [name for name in rows if name.startswith("901_")]
        assert tasks == [f"901_{task}" for task in (3, 4, 5, 6, 9, 20, 23, 26)]
        assert rows["901_23"].cancelled_by == 1000

    def test_with_a_word_nobody_knows_are_unknown_and_of_other_jobs_are_left_out(self) -> None:
        assert rows_of(WRITTEN_23_11)["904"].state is TaskState.UNKNOWN
        assert set(parse_sacct(RECORDED_22_05, ["2"])[0]) == {"2"}


class TestFigures:
    def test_are_read_from_old_and_new_formats(self) -> None:
        rows = rows_of(WRITTEN_20_11 + WRITTEN_23_11 + RECORDED_22_05)
        assert rows["102"].cpu_s == 86_400 + 2 * 3600 + 3 * 60 + 4
        assert rows["101_7"].ended == datetime(2021, 3, 1, 10, 12, 9).timestamp()  # noqa: DTZ001 - Slurm's own
        assert rows["26"].started == 1795301550

    def test_of_sizes_durations_times_and_exit_codes(self) -> None:
        sizes = {"121588K": 121588 << 10, "1.5G": 3 << 29, "0": 0, "2T": 2 << 40, "512": 512, "": None, "?": None}
        assert {text: bytes_of(text) for text in sizes} == sizes
        durations = {
            "00:00.018": 0.018,
            "01:02:03": 3723,
            "2-00:00:01": 172_801,
            "Unknown": None,
            "": None,
            "x-1": None,
        }
        assert {text: seconds_of(text) for text in durations} == durations
        for text in ("Unknown", "None", "", "N/A", "2026-13-45T00:00:00", "0", "9" * 15):
            assert epoch_of(text) is None, text
        codes = {"0:9": (None, 9), "75:0": (75, None), "0:0": (0, None), "": (None, None), "x:y": (None, None)}
        assert {text: exit_of(text) for text in codes} == codes
        for state in TaskState:
            word = state.value
            assert parse_state(word) is parse_state(f"{word} by 0") is parse_state(f"{word}+") is state

    def test_of_arrays_that_slurm_cut(self) -> None:
        assert list(expand("12_[4-9:2%2]")) == ["12_4", "12_6", "12_8"]
        assert list(expand("12_[1,3,...]")) == ["12_1", "12_3"]
        assert list(expand("12_[9-4]")) == []
        assert list(expand("12")) == ["12"]


class TestAText:
    def test_that_was_cut_anywhere_loses_rows_but_makes_none_up(self) -> None:
        for text in TEXTS:
            whole = rows_of(text)
            for end in range(len(text)):
                rows, _ = parse_sacct(text[:end], jobs_in(text))
                assert rows.keys() <= whole.keys()
                assert all(whole[name].state is TaskState.COMPLETED or not row.state.ok for name, row in rows.items())

    @settings(max_examples=300, deadline=None)
    @given(st.sampled_from(TEXTS), st.randoms(use_true_random=False), st.integers(1, 40))
    def test_that_was_garbled_never_shows_a_success_nobody_had(
        self, text: str, chance: random.Random, wounds: int
    ) -> None:
        hurt = list(text)
        for _ in range(wounds):
            start = chance.randrange(len(hurt))
            hurt[start : start + chance.choice((0, 1, 1, 3, 50))] = chance.choice(
                ("", "", "|", "\n", "9", "_", "\x85", "Ä", "x:y")
            )
        rows, _ = parse_sacct("".join(hurt), jobs_in(text))
        for name, row in rows.items():
            assert not row.state.ok or "COMPLETED" in said_of(text, name), name
        assert all(row.status(0, "", "").job in jobs_in(text) for row in rows.values())

    @settings(max_examples=300, deadline=None)
    @given(st.text(alphabet="|0125_[]%-.:KMG\n COMPLETED", max_size=400))
    def test_of_nonsense_never_raises(self, text: str) -> None:
        parse_sacct(text, ["1", "2"])
        parse_squeue(text)

    @given(st.lists(st.text(alphabet="0159:-.KMG?T", max_size=20), min_size=14, max_size=14))
    def test_of_nonsense_in_every_column_never_raises(self, cells: list[str]) -> None:
        text = "|".join(["5", *cells, "5"]) + "\n" + "|".join(["5.0", *cells, "5.0"])
        rows, torn = parse_sacct(text, ["5"])
        assert torn == 0
        assert not rows["5"].state.ok
        assert rows["5"].status(0, "", "").job == "5"

    def test_of_ten_thousand_tasks_takes_a_few_calls_a_task(self) -> None:
        text = array_text(10_000)
        rows = parse_sacct(text, ["7"])[0]
        assert len(rows) == 10_000
        assert rows["7_9999"].peak_rss_bytes == 121588 << 10
        assert calls_of(lambda: parse_sacct(text, ["7"])) < 120 * 10_000


class TestALook:
    def test_is_one_command_for_all_jobs(self) -> None:
        slurm = Slurm(RECORDED_22_05)
        look = Accounting(slurm.run).look({"26": "b", "1": "a"}, time.time())
        assert set(look.rows) == {"26", "1_0", "1_1"}
        assert look.trouble == ""
        (argv,) = slurm.asked
        assert argv[0] == "sacct"
        assert {"--jobs=1,26", "--name=a,b", f"--user={os.getuid()}"} <= {*argv}

    def test_at_very_many_jobs_is_as_few_commands_as_a_command_line_allows(self) -> None:
        slurm = Slurm("")
        Accounting(slurm.run).look(dict.fromkeys(map(str, range(JOBS_A_CALL + 1)), "a"), 0.0)
        assert len(slurm.asked) == 2
        assert Accounting(slurm.run).look({}, 0.0).rows == {}
        assert len(slurm.asked) == 2

    def test_in_trouble_has_no_rows_and_says_why(self) -> None:
        refused = "sacct: error: slurm_persist_conn_open: failed to open connection to host: Connection refused"
        down = ("Slurm accounting storage is disabled", refused, "sacct timed out after 20 s", "sacct: No such file")
        for said in (*down, "", "something new"):
            look = Accounting(Slurm(CommandFailed(said)).run).look({"1": "a"}, time.time())
            assert (look.rows, bool(look.trouble)) == ({}, True), said

    def test_at_a_torn_text_says_so(self) -> None:
        look = Accounting(Slurm(RECORDED_22_05[:-3]).run).look({"49": "a"}, time.time())
        assert set(look.rows) == {"49_0"}
        assert look.trouble

    def test_knows_a_task_that_was_cancelled_while_it_waited(self) -> None:
        look = Accounting(Slurm(RECORDED_22_05).run).look({"27": "a", "999": "b"}, time.time())
        assert look.never_began("27", 3)
        assert not look.never_began("27", 1)
        assert not look.never_began("999", 0), "of a job that the accounting does not know nobody can tell"

    def test_keeps_to_its_time_over_all_its_commands(self) -> None:
        slurm = Slurm("")
        Accounting(slurm.run, timeout_s=5.0).look(dict.fromkeys(map(str, range(3 * JOBS_A_CALL)), "a"), 0.0)
        assert all(limit_s <= 5.0 for limit_s in slurm.limits_s)
        assert slurm.limits_s == sorted(slurm.limits_s, reverse=True)


class TestTheQueue:
    def test_says_how_a_suspended_task_goes_on(self) -> None:
        line = "{0}|{1}|None|2026-11-26T11:57:26|n1|{0}\n"
        suspended, runs = parse_squeue(line.format("7_0", "SUSPENDED") + line.format("7_1", "RUNNING")).values()
        assert ("scontrol resume" in suspended.waits_for, runs.waits_for) == (True, "")

    def test_shows_each_task_with_what_it_waits_for(self) -> None:
        tasks = parse_squeue(SQUEUE_22_05)
        assert tasks["26"].state is TaskState.RUNNING
        assert (tasks["26"].node, tasks["26"].starts, tasks["26"].waits_for) == ("n1", 1795301550, "")
        assert tasks["27_2"].waits_for
        assert {"46_1", "46_2", "46_4", "46_5"} <= tasks.keys()
        assert "46_3" not in tasks
        assert tasks["46_5"].starts == 1795309999
        assert "UnavailableNodes:n[1-2]" in tasks["60"].waits_for
        assert tasks["64"].waits_for == "SomethingNew"
        assert "QOSMaxWallDurationPerJobLimit" in tasks["65"].waits_for
        assert "66" not in tasks, "its line was cut"

        stuck = {name for name, task in tasks.items() if is_stuck(task.state, task.waits_for)}
        assert stuck == {"61", "62", "63", "65"}


class Slurm:
    def __init__(self, answer: str | CommandFailed) -> None:
        self._answer = answer
        self.asked: list[list[str]] = []
        self.limits_s: list[float] = []

    def run(self, argv: Sequence[str], timeout_s: float) -> str:
        self.asked.append(list(argv))
        self.limits_s.append(timeout_s)
        if isinstance(self._answer, CommandFailed):
            raise self._answer
        return self._answer


def line(job: str, state: str, code: str, submit: str = "1700000000", rss: str = "", **more: str) -> str:
    named = {"JobID": job, "State": state, "ExitCode": code, "Submit": submit, "MaxRSS": rss, **more}
    return "|".join(named.get(column, "") for column in SACCT_COLUMNS.split(",")) + "\n"


def said_of(text: str, name: str) -> set[str]:
    """Return every word that a text has on the state of a job's own records."""
    array = name.partition("_")[0]
    cells = [line.split("|") for line in text.splitlines()]
    return {cell[2] for cell in cells if cell[0] == name or cell[0].startswith(f"{array}_[")}


def test_how_busy_and_full_gpus_were_is_read_where_the_site_measures_it_and_0_is_unknown() -> None:
    step = "5.0|{}|COMPLETED|0:0|||00:00|1795301332|1795301332|1795301333|1|n1|||1|5.0\n"
    job = "5|cpu=1|COMPLETED|0:0|0:0||00:00|1795301332|1795301332|1795301333|1|n1|None|||5\n"

    def told(usage: str) -> tuple[float | None, int | None]:
        status = rows_of(job + step.format(usage))["5"].status(0, "", "")
        return status.gpu_busy, status.gpu_bytes

    assert told("cpu=00:00:01,gres/gpumem=1024M,gres/gpuutil=35,mem=1G") == (0.35, 1 << 30)
    assert told("gres/gpumem=1M") == (None, 1 << 20)
    assert told("gres/gpumem=0,gres/gpuutil=0") == (None, None)
    assert told("cpu=00:00:01,mem=1G") == (None, None)
