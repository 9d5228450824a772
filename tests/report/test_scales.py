"""Axes have round numbers in a unit that people read, and say of when and of what they speak."""

from __future__ import annotations

from pipeline.report.charts import Axis, byte_axis, figure, number_axis, time_axis, whole_axis

MIDNIGHT = 1_767_225_600.0  # 2026-01-01


def said(axis: Axis) -> list[str]:
    return [words for _, words in axis.ticks]


def test_numbers_are_round_and_hold_what_they_should() -> None:
    for low, high, ticks in [
        (0, 1, "0.0 0.2 0.4 0.6 0.8 1.0"),
        (0.262, 0.298, "0.26 0.27 0.28 0.29 0.30"),
        (0, 0, "0.0 0.2 0.4 0.6 0.8 1.0"),
        (0, 12_000, "0 2,500 5,000 7,500 10,000 12,500"),
        (-1, 1, "-1.0 -0.5 0.0 0.5 1.0"),
        (0.000482, 0.000518, "0.00048 0.00049 0.00050 0.00051 0.00052"),
        (0, 9e-6, "0 2e-06 4e-06 6e-06 8e-06 1e-05"),
    ]:
        axis = number_axis(low, high)
        assert said(axis) == ticks.split()
        assert axis.low <= low <= high <= axis.high


def test_any_number_and_numbers_that_differ_by_rounding_alone_have_an_axis() -> None:
    for value in (1e-12, 3.7e-7, 5e8, 2e15, -4.2, 1.0):
        axis = number_axis(value, value)
        assert 0 < axis.place(value, 0, 100) < 100
        assert len(set(said(axis))) == len(axis.ticks)
    for low, high in [  # as a metric has that no longer changes: there is no round number between them
        (0.2253297910608818, 0.22532979106088183),
        (-3.6769218839480917, -3.6769218839480913),
        (0.0, 5e-324),
        (0.0, 4e-323),
    ]:
        axis = number_axis(low, high)
        assert axis.low < axis.high
        assert 0 <= axis.place(low, 0, 1) <= axis.place(high, 0, 1) <= 1
        assert len(axis.ticks) >= 3


def test_memory_is_counted_in_the_unit_of_the_most_epochs_are_whole_and_figures_are_short() -> None:
    assert (byte_axis(3 << 30).unit, said(byte_axis(3 << 30))[-1]) == ("GiB", "3")
    assert (byte_axis(700 << 20).unit, byte_axis(0).unit) == ("MiB", "B")
    assert said(whole_axis(1, 3)) == ["1", "2", "3"]
    assert whole_axis(7, 7).low < 7 < whole_axis(7, 7).high
    values = {0: "0", 1295.05: "1,295", 0.26941: "0.2694", 4.86e-4: "4.86e-04", 3e12: "3e+12"}
    assert {value: figure(value) for value in values} == values


def test_time_is_counted_from_the_beginning_or_is_the_time_of_day_or_the_day() -> None:
    axis = time_axis(MIDNIGHT + 31, MIDNIGHT + 52)
    assert (said(axis), axis.unit) == (["0", "5", "10", "15", "20"], "seconds")
    hours = time_axis(MIDNIGHT + 600, MIDNIGHT + 4 * 3600)
    assert (said(hours), hours.unit) == (["01:00", "02:00", "03:00", "04:00"], "UTC")
    assert said(time_axis(MIDNIGHT, MIDNIGHT + 8 * 86400))[1] == "01-03"
