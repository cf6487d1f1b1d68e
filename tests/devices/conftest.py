"""Tests of several devices: four virtual ones of a CPU, of which a module uses DEVICES, or two.

`make test` runs them in an invocation of their own, since a process has one number of devices.
"""

from collections.abc import Iterator

import jax
import pytest

FLAG = "--xla_force_host_platform_device_count=4"


@pytest.fixture(autouse=True, scope="module")
def own_devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Show the library as many devices as the module asks for. No more than two share collectives: with more
    devices than cores, collectives that overlap can hang on a CPU."""
    found, count = jax.devices(), getattr(request.module, "DEVICES", 2)
    if len(found) < 4:
        pytest.skip(f"needs XLA_FLAGS={FLAG}, as `make test` sets it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: found[:count])
        patch.setattr(jax, "device_count", lambda *_: count)
        yield
