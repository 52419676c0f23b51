"""Clock, power and throttling of a GPU: sampled in the window, of the rank's own device."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vitsweep.measure.environment import DeviceMonitor, nvml_device

GPU = torch.device("cuda", 0)


class Driver:
    """Stands for NVML on a machine without a GPU: two devices, of which CUDA shows the second."""

    NVML_CLOCK_SM = 1
    nvmlClocksThrottleReasonSwPowerCap = 0x4
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80
    NVMLError = LookupError

    def __init__(self, uuid: str = "GPU-bb") -> None:
        self.uuid, self.mhz, self.reasons = (
            uuid,
            1900,
            0x4,
        )  # the power limit, which is no throttling
        self.millijoules = 5e6

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise LookupError("not found")
        return uuid

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert (handle, kind) == (self.uuid, self.NVML_CLOCK_SM)
        return self.mhz

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> float:
        if self.uuid.startswith("MIG"):
            raise LookupError("not supported")
        self.millijoules += 100_000
        return self.millijoules

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.reasons


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return installed(monkeypatch, Driver())


def installed(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Driver:
    monkeypatch.setitem(sys.modules, "pynvml", driver)  # type: ignore[arg-type]
    shown: Any = SimpleNamespace(uuid="bb")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: shown)
    return driver


def wait_for(monitor: DeviceMonitor, samples: int) -> None:
    deadline = time.monotonic() + 60
    while len(monitor._samples) < samples:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_values_are_means_over_the_window_alone(driver: Driver) -> None:
    monitor = DeviceMonitor(GPU, interval_s=0.01)
    driver.mhz, driver.reasons = 1000, 0  # still warming up
    wait_for(monitor, 3)
    driver.mhz, driver.reasons = 1500, 0x4
    wait_for(monitor, len(monitor._samples) + 2)  # one may have begun before the change
    since = time.perf_counter()
    wait_for(monitor, len(monitor._samples) + 3)
    found = monitor.end(since)
    assert (found.sm_clock_mhz, found.power_capped_share, found.throttled) == (1500.0, 1.0, False)


def test_energy_is_the_difference_of_the_counter_over_the_window(driver: Driver) -> None:
    monitor = DeviceMonitor(GPU, interval_s=0.01)
    since = time.perf_counter()
    wait_for(monitor, 5)
    found = monitor.end(since)
    times = [sample[0] for sample in monitor._samples if sample[0] >= since]
    sampled = 100 * (len(times) - 1) / (times[-1] - times[0])  # watts
    assert found.energy_j == pytest.approx(sampled * (times[-1] - since))


def test_a_device_without_a_counter_has_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Driver(uuid="MIG-bb"))
    monitor = DeviceMonitor(GPU, interval_s=0.01)
    wait_for(monitor, 3)
    found = monitor.end(0.0)
    assert found.energy_j is None
    assert found.power_capped_share == 1.0


def test_one_sample_at_a_thermal_limit_is_throttling(driver: Driver) -> None:
    monitor = DeviceMonitor(GPU, interval_s=0.01)
    driver.reasons |= driver.nvmlClocksThrottleReasonHwThermalSlowdown
    wait_for(monitor, 3)
    driver.reasons = 0
    assert monitor.end(0.0).throttled is True


def test_a_window_shorter_than_the_interval_still_has_a_sample(driver: Driver) -> None:
    monitor = DeviceMonitor(GPU, interval_s=100.0)
    assert monitor.end(time.perf_counter()).sm_clock_mhz == 1900.0


def test_a_slice_is_found_by_its_own_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Driver(uuid="MIG-bb"))
    assert nvml_device(GPU)[1] == "MIG-bb"


def test_without_a_driver_the_values_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = DeviceMonitor(GPU).end(0.0)
    assert found.sm_clock_mhz is found.power_capped_share is found.throttled is None
    on_cpu = DeviceMonitor(torch.device("cpu")).end(0.0)
    assert on_cpu.throttled is None
    assert on_cpu == found
