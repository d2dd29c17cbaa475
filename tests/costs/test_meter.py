"""The arithmetic of measuring, with a clock that goes as told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlab.costs import Meter, RunWork
from titanlab.costs import meter as names


class Clock:
    """Seconds that pass when told; whole numbers of 1/1024, so that sums are exact."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def run(self, seconds):
        self.now += seconds


def metered(clock, **given):
    work = RunWork(devices=2, flops_per_token=3e9, convention="6N", peak_flops=1e12, peak_source="datasheet")
    meter = Meter(given.pop("work", work), clock=clock, **given)
    meter.begin()
    return meter


def test_a_window_has_exact_figures():
    clock = Clock()
    meter = metered(clock)
    for seconds in (1.0, 2.0, 5.0):
        with meter.loading_data():
            clock.run(0.25)
        clock.run(seconds - 0.25)
        assert meter.end_step(tokens=400) == seconds
    speed = meter.window()
    with pytest.raises(RuntimeError, match="no step since"):
        meter.window()
    assert speed.steps == 3
    assert speed.step_seconds == 8 / 3
    assert speed.step_seconds_median == 2.0
    assert speed.data_seconds == 0.25
    assert speed.tokens_per_second == 1200 / 8 / 2
    assert speed.tflops == 75 * 3e9 / 1e12
    assert speed.mfu_percent == pytest.approx(100 * 75 * 3e9 / 1e12)
    assert not speed.warming_up
    assert meter.summary()[names.TOKENS_SEEN] == 1200
    assert {name: speed.metrics()[name] for name in ("throughput(tps)", "time_metrics/end_to_end(s)")} == {
        "throughput(tps)": 75.0,
        "time_metrics/end_to_end(s)": 8 / 3,
    }
    assert speed.metrics()["time_metrics/data_loading(%)"] == 9.375


def test_pauses_belong_to_no_step_wherever_they_fall():
    clock = Clock()
    meter = metered(clock)
    clock.run(1.0)
    with meter.paused():
        clock.run(50.0)
        with meter.loading_data():  # A validation's own batches.
            clock.run(50.0)
        with meter.paused():
            clock.run(25.0)
    clock.run(1.0)
    assert meter.end_step(tokens=10) == 2.0
    with meter.paused():
        clock.run(100.0)
    clock.run(3.0)
    assert meter.end_step(tokens=10) == 3.0
    speed = meter.window()
    assert (speed.step_seconds, speed.data_seconds) == (2.5, 0.0)
    assert meter.summary()[names.PAUSED_SECONDS] == 225.0
    assert meter.summary()[names.TRAIN_SECONDS] == 5.0


def test_a_step_that_is_read_late_lasts_as_long_as_it_took():
    clock = Clock()
    meter = metered(clock)
    begun = clock()
    loads = (0.5, 0.25, 0.125)
    for seconds in loads[:2]:
        with meter.loading_data():
            clock.run(seconds)
    clock.run(2.0)
    # The first one is read while the second one is computed; the third one has begun when both are read.
    assert meter.end_step(tokens=10, at=begun + 1.0) == 1.0
    with meter.loading_data():
        clock.run(loads[2])
    assert meter.end_step(tokens=10, at=begun + 2.5) == 1.5
    assert meter.end_step(tokens=10, at=begun + 4.5) == 2.0
    assert [meter._data_seconds[step] for step in range(3)] == list(loads)


def test_batches_of_steps_that_were_given_up_count_in_none():
    clock = Clock()
    meter = metered(clock)
    with meter.loading_data():
        clock.run(8.0)
    meter.forget_batches()
    with meter.loading_data():
        clock.run(1.0)
    meter.end_step(tokens=1)
    assert meter.window().data_seconds == 1.0


def test_what_happens_once_is_no_pause_to_come():
    clock = Clock()
    meter = metered(clock)
    clock.run(32.0)
    # Found when it has been spent: thirty seconds of compilation.
    meter.leave_out(30.0)
    assert meter.end_step(tokens=100) == 2.0
    assert meter.seconds_left(10) == 20.0
    with meter.paused():
        clock.run(1.0)
    clock.run(2.0)
    assert meter.end_step(tokens=100) == 2.0
    assert meter.seconds_left(10) == 10 * (2.0 + 1.0 / 2)
    assert meter.summary()[names.PAUSED_SECONDS] == 31.0


@pytest.mark.parametrize(
    ("peak", "mfu"),
    [
        ({}, None),
        ({"peak_flops": 2e12}, 50.0),
        # A share of more than the peak: it was measured too low, unless some products have a faster format.
        ({"peak_flops": 0.8e12}, None),
        ({"peak_flops": 0.8e12, "may_exceed_peak": True}, 125.0),
    ],
)
def test_mfu_is_a_share_of_a_peak_that_is_known(peak, mfu):
    clock = Clock()
    meter = metered(clock, work=RunWork(devices=1, flops_per_token=1e9, **peak), tokens_seen=24)
    clock.run(1.0)
    meter.end_step(tokens=1000)
    assert meter.window().mfu_percent == mfu
    assert [meter.summary()[name] for name in (names.MFU, names.TFLOPS, names.TOKENS_SEEN)] == [mfu, 1.0, 1024]


def test_warm_up_is_marked_and_left_out_of_the_summary():
    clock = Clock()
    meter = metered(clock, warmup_steps=2)
    marks = []
    for seconds in (60.0, 30.0, 1.0, 3.0, 2.0):
        clock.run(seconds)
        meter.end_step(tokens=120)
        marks.append(meter.window().warming_up)
    assert marks == [True, True, False, False, False]
    summary = meter.summary()
    assert summary[names.STEP_SECONDS] == 2.0
    assert (summary[names.STEP_SECONDS_LOW], summary[names.STEP_SECONDS_HIGH]) == (1.5, 2.5)
    assert summary[names.TOKENS_PER_SECOND] == 120 / 2.0 / 2
    assert summary[names.MEASURED_STEPS] == 3
    assert summary[names.TRAIN_SECONDS] == 96.0
    assert summary["flops_convention"] == "6N"
    assert summary["peak_source"] == "datasheet"


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_ended_in_warm_up_has_no_throughput(steps):
    clock = Clock()
    meter = metered(clock, warmup_steps=2)
    for _ in range(steps):
        clock.run(1.0)
        meter.end_step(tokens=5)
    summary = meter.summary()
    assert meter.measured() is None
    assert summary[names.TOKENS_PER_SECOND] is None
    assert summary[names.STEP_SECONDS] is None
    assert summary[names.MEASURED_STEPS] == 0
    assert summary[names.TOKENS_SEEN] == 5 * steps


def test_time_left():
    clock = Clock()
    meter = metered(clock, warmup_steps=1)
    assert meter.seconds_left(9) is None
    clock.run(60.0)
    meter.end_step(tokens=1)
    assert meter.seconds_left(9) is None
    for _ in range(3):
        clock.run(2.0)
        meter.end_step(tokens=1)
    assert meter.seconds_left(6) == 12.0
    with meter.paused():
        clock.run(4.0)
    # One second of pause a step so far.
    assert meter.seconds_left(6) == 18.0
    assert meter.seconds_left(0) == 0.0
    # The last hundred steps count.
    for _ in range(100):
        clock.run(4.0)
        meter.end_step(tokens=1)
    assert meter.seconds_left(10) == 40.0 + 10 * 4 / 104


def test_steps_before_the_beginning_are_a_mistake():
    with pytest.raises(RuntimeError, match=r"before Meter\.begin"):
        Meter(RunWork(devices=1, flops_per_token=1.0)).end_step(tokens=1)


EVENTS = st.lists(st.tuples(st.sampled_from(["work", "data", "pause", "step"]), st.integers(0, 4096)), max_size=60)


@given(EVENTS, st.integers(0, 3))
def test_every_second_is_counted_once(events, warmup_steps):
    clock = Clock()
    meter = metered(clock, warmup_steps=warmup_steps)
    start, data, tokens = clock.now, 0.0, 0
    for event, ticks in [*events, ("step", 1)]:
        seconds = ticks / 1024
        if event == "data":
            with meter.loading_data():
                clock.run(seconds)
            data += seconds
        elif event == "pause":
            with meter.paused():
                clock.run(seconds)
        else:
            clock.run(seconds)
        if event == "step":
            meter.end_step(tokens=ticks)
            tokens += ticks
    summary = meter.summary()
    assert summary[names.TRAIN_SECONDS] + summary[names.PAUSED_SECONDS] == pytest.approx(clock.now - start)
    assert summary[names.TOKENS_SEEN] == tokens
    speed = meter.window()
    assert speed.data_seconds * speed.steps == pytest.approx(data)
    assert speed.step_seconds * speed.steps == pytest.approx(summary[names.TRAIN_SECONDS])
