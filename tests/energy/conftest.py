import pytest

from penstock.energy import lease, nvml
from tests.energy.nvml import fake


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A folder of fake devices with one H200, whose limits may be set; leases lie in a folder of the test's own."""
    monkeypatch.setenv("FAKE_NVML", str(tmp_path))
    monkeypatch.setenv(lease.FOLDER, str(tmp_path / "leases"))
    monkeypatch.delenv(nvml.OBSERVE_ONLY)
    nvml._library.cache_clear()
    fake.make(tmp_path)
    return tmp_path
