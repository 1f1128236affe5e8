"""Block sizes: the table of a device, a default where it says nothing."""

import json

import pytest

from pallas_kernels import tuning

DEFAULT = {"block": 128, "warps": 4}


@pytest.fixture
def device(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_FOLDER", tmp_path)
    tuning._table.cache_clear()
    (tmp_path / "some-device-80gb.json").write_text(json.dumps({"op/xla": {"block": 64, "unknown": 3}}))
    yield "Some Device 80GB"
    tuning._table.cache_clear()


def test_the_table_overrides_the_default_size_by_size(device):
    assert tuning.block("op/xla", device, DEFAULT) == {"block": 64, "warps": 4}
    assert tuning.block("op/triton", device, DEFAULT) == DEFAULT


def test_a_device_without_a_table_has_the_defaults(device):
    assert tuning.block("op/xla", "another", DEFAULT) == DEFAULT


def test_sizes_on_trial_come_first_and_go_again(device):
    with tuning.trying({"op/xla": {"block": 32}}) as asked:
        assert tuning.block("op/xla", device, DEFAULT)["block"] == 32
        assert asked == {"op/xla": {"block": 32, "warps": 4}}
    assert tuning.block("op/xla", device, DEFAULT)["block"] == 64


def test_tables_in_the_package_name_whole_sizes():
    for file in (tuning.Path(tuning.__file__).parent / "tuning").glob("*.json"):
        for op, sizes in json.loads(file.read_text()).items():
            assert "/" in op and all(isinstance(size, int) and size >= 1 for size in sizes.values()), file
