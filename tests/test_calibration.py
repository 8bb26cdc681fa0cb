"""Calibration: fits find known constants; the file is what --hardware reads."""

import contextlib
import io
import json
import math
from dataclasses import asdict

import jax
import pytest

from meshpar.calibration import measure
from meshpar.calibration.fit import attention_constants, fitted_link, matmul_flops
from meshpar.calibration.measure import calibrate
from meshpar.calibration.trials import Exchange, KernelSizes, exchange_trial, exchanges
from meshpar.cli.main import main
from meshpar.hardware.devices import DEVICES
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.cluster import Link
from meshpar.planner.machine.clusters import cluster_of, load_device

SHAPES = [(64, 64, 64), (128, 256, 512), (1024, 512, 2048)]
SMALL = KernelSizes(
    matmuls=((16, 32, 32), (32, 64, 64)),
    stream_bytes=(2**15, 2**16),
    flops=1e5,
    exchange_bytes=(2**12, 2**14),
)


@pytest.fixture(scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "CPU_SIZES", SMALL)
        yield


@pytest.fixture(scope="module")
def file_and_report(small, tmp_path_factory):
    """What `meshpar calibrate` writes and prints of all devices."""
    path, printed = tmp_path_factory.mktemp("file") / "mine.toml", io.StringIO()
    with contextlib.redirect_stdout(printed):
        argv = ["calibrate", "--output", str(path), "--rounds", "1", "--json"]
        assert main(argv) == 0
    return path, json.loads(printed.getvalue())


def test_matmuls_of_known_rate_give_that_rate():
    def taken(rows, inner, columns):
        values = rows * inner + inner * columns + rows * columns
        flops = 2 * rows * inner * columns
        return 1e-6 + math.hypot(flops / 3e12, values * 2 / 1e11)

    found = matmul_flops(
        SHAPES,
        [taken(*shape) for shape in SHAPES],
        value_bytes=2,
        memory_bytes_per_s=1e11,
        launch_s=1e-6,
    )
    assert found == pytest.approx(3e12, rel=1e-3)


def test_collectives_on_a_known_link_give_that_link():
    link = Link(name="host", bytes_per_s=2e9, hop_s=5e-5)
    wanted = exchanges(8, (2**14, 2**18, 2**22))
    times = [one.expected_s(link) for one in wanted]
    found = fitted_link([one.expected_s for one in wanted], times)
    assert found.bytes_per_s == pytest.approx(2e9, rel=0.01)
    assert found.hop_s == pytest.approx(5e-5, rel=0.01)


def test_attention_constants_give_the_shares_they_were_fitted_to():
    whole, head_dim = attention_constants({64: 0.4, 128: 0.5})
    assert whole * 64 / (64 + head_dim) == pytest.approx(0.4)
    assert whole * 128 / (128 + head_dim) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["all-reduce", "there and back", "collective-permute"])
def test_an_exchange_runs_over_every_group(kind):
    trial = exchange_trial(
        jax.devices(), Exchange(kind=kind, members=4, payload_bytes=2**12)
    )
    values = trial.run()
    assert values.shape == (8, 2**10)
    assert bool(jax.numpy.all(jax.numpy.isfinite(values)))


def test_the_file_is_a_device_that_estimates_use(file_and_report, capsys):
    path, report = file_and_report
    device = load_device(path)
    assert device.name == "mine" and device.domain_devices == 8
    assert device.efficiency.hop_s > 0 and device.efficiency.launch_s > 0
    assert device.peak_flops["fp32"] == pytest.approx(
        report["device"]["peak_flops"]["fp32"], rel=1e-4
    )
    names = [trial["name"] for trial in report["trials"]]
    assert any("matmul 16 x 32 x 32 fp32" in name for name in names)
    assert any("all-reduce of 16 KiB over 8 devices" in name for name in names)
    words = ["estimate", "--preset", "tiny", "--hardware", str(path), "--seq", "64"]
    assert main([*words, "--layout", "data=8", "--execution", "meshpar-cpu"]) == 0
    assert "8 x mine on 1 host" in capsys.readouterr().out


def test_one_device_has_no_links_to_measure(small):
    found = calibrate(jax.devices()[:1], name="one", rounds=1)
    assert found.num_devices == 1
    assert not any("over" in name for name, *_ in found.rows)
    cluster = cluster_of("h100-80gb", devices=1)
    assert type(found.device) is type(cluster.device)


def test_beside_a_data_sheet_what_was_not_measured_stays(small):
    like = DEVICES["a100-80gb"]
    device = calibrate(jax.devices()[:1], name="mine", rounds=1, like=like).device
    assert device.peak_flops == like.peak_flops
    assert device.memory_bytes == like.memory_bytes
    assert 0 < device.efficiency.matmul < like.efficiency.matmul
    kept = ("link", "network", "hop_s", "attention")
    for name in kept:
        assert asdict(device.efficiency)[name] == asdict(like.efficiency)[name]


def test_a_faster_device_is_predicted_faster(file_and_report):
    device = load_device(file_and_report[0])
    found = measure.replace(
        device, peak_flops={key: 2 * peak for key, peak in device.peak_flops.items()}
    )
    from meshpar.planner.machine.cluster import Cluster
    from meshpar.planner.workload.shapes import SHAPES as MODELS

    slow, fast = (
        estimate(
            MODELS["tiny"],
            Cluster(device=one, devices_per_host=8),
            "data=8",
            global_batch=8,
            seq=64,
        ).step_s
        for one in (device, found)
    )
    assert fast < slow


@pytest.mark.parametrize(
    "more, refusal",
    [
        (["--output", "file.txt"], ("command.unknown_suffix", "file.txt", ".toml")),
        (
            ["--output", "/no/such/folder/a.toml"],
            ("command.no_folder", "--output", "'/no/such/folder'"),
        ),
        (["--like", "h101"], ("hardware.unknown_device", "'h101'")),
        (["--rounds", "0"], ("value.not_whole_number", "--rounds", 0, 1)),
    ],
)
def test_bad_input_ends_with_2_and_one_line(more, refusal, refuses_command):
    refuses_command(["calibrate", *more], *refusal)


def test_no_rounds_are_refused(refuses):
    with refuses("value.below_one", "rounds=0", 1):
        calibrate(jax.devices(), name="none", rounds=0)
