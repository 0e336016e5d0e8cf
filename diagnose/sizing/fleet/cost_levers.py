"""What levers on a bill are worth: idle hours, standby, shorter prompts, other GPUs. Pure.

Guide 9.2. Routing between models is in `routing`.
"""

from __future__ import annotations

from kneewatch.diagnose.sizing.fleet.cost import usd_per_hour
from kneewatch.diagnose.sizing.inputs import SizingError, positive, within


def idle_usd_per_year(
    *, gpus: float, usd_per_gpu_hour: float, idle_hours_per_day: float, days: float = 365
) -> float:
    """Dollars per year for hours in which nothing is served, such as nights.

    Raises:
        SizingError: a number is not positive, or more than 24 hours or 366 days.
    Source: guide 9.2 (aggressive autoscaling, offline batch fill).
    """
    within("idle_hours_per_day", idle_hours_per_day, low=0, high=24)
    within("days", days, low=0, high=366)
    return usd_per_hour(gpus=gpus, usd_per_gpu_hour=usd_per_gpu_hour) * idle_hours_per_day * days


def standby_break_even_usd_per_request(
    *,
    gpus_per_instance: int,
    usd_per_gpu_hour: float,
    standby_hours: float,
    requests_per_s_unserved: float,
    cold_start_s: float,
) -> float:
    """Dollars per late request from which one warm standby is cheaper than one cold start.

    The standby's hours against the requests that arrive unserved while an instance starts.

    Raises:
        SizingError: a number is not positive.
    Source: guide 9.2 (one warm instance against a 3-minute cold start).
    """
    for name, value in (
        ("standby_hours", standby_hours),
        ("requests_per_s_unserved", requests_per_s_unserved),
        ("cold_start_s", cold_start_s),
    ):
        positive(name, value)
    hourly = usd_per_hour(gpus=gpus_per_instance, usd_per_gpu_hour=usd_per_gpu_hour)
    return hourly * standby_hours / (requests_per_s_unserved * cold_start_s)


def shorter_prompt_gain_ratio(*, cut_ratio: float, prompt_work_ratio: float) -> float:
    """Throughput gained by cutting prompts, as a ratio (0.3: 30 % more requests per GPU-hour).

    Only the work that prompts cause shrinks: `prompt_work_ratio` of all GPU time, prefill and the
    reading of their KV. 1 / (1 - cut x share) - 1.

    Raises:
        SizingError: a ratio is outside 0..1, or everything is cut.
    Source: guide 9.2 says that a 30 % cut gives 30 %; that holds for a share of 77 %.
    """
    within("cut_ratio", cut_ratio, low=0, high=1)
    within("prompt_work_ratio", prompt_work_ratio, low=0, high=1)
    left = 1 - cut_ratio * prompt_work_ratio
    if left <= 0:
        raise SizingError("cutting all of the prompt leaves no work to compare", name="cut_ratio")
    return 1 / left - 1


def relative_value_ratio(*, throughput_ratio: float, price_ratio: float) -> float:
    """Tokens per dollar of one GPU against another: throughput over price, both relative.

    Raises:
        SizingError: a ratio is not positive.
    Source: GPU selection text, question 3.
    """
    positive("throughput_ratio", throughput_ratio)
    positive("price_ratio", price_ratio)
    return throughput_ratio / price_ratio
