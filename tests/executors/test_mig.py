"""MIG slices, as nvidia-smi lists them."""

import pytest

from penstock.executors.processes.mig import slices

LISTED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5b)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4)
  MIG 1g.5gb      Device  1: (UUID: MIG-cba6)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-4200)
GPU 2: NVIDIA H200 (UUID: GPU-77aa)
  MIG 1g.18gb+me  Device  0: (UUID: MIG-GPU-77aa/1/0)
"""


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["MIG-c6d4", "MIG-cba6", "MIG-GPU-77aa/1/0"]),
        ("2,0", ["MIG-GPU-77aa/1/0", "MIG-c6d4", "MIG-cba6"]),
        ("GPU-5d5b", ["MIG-c6d4", "MIG-cba6"]),
        ("MIG-cba6, MIG-c6d4", ["MIG-cba6", "MIG-c6d4"]),
        ("1", []),
        ("", []),
    ],
)
def test_the_slices_that_the_environment_names_are_devices_in_its_order(visible, names):
    assert [one.name for one in slices(LISTED, visible)] == names


def test_a_slices_type_is_its_gpus_with_its_profile_and_its_memory_less_than_that_says():
    large, small, _ = slices(LISTED, None)
    assert (large.type, small.type) == ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    assert small.memory == 5 * 2**30 * 7 // 8
