"""Plans of models with tables: lookups, exchanges and memory by closed forms."""

import dataclasses
import json

import pytest

from meshpar.cli.main import main
from meshpar.models.presets import build
from meshpar.planner.curve import scaling_curve
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.search.space import Constraints
from meshpar.tables import Table
from meshpar.tables.exchange import LEAST_ROOM, SLACK
from meshpar.tables.plan import TableRequest, TableTraffic

DIM, FEATURES = 16, 6


def request(devices=4, global_batch=4096, rows=1_000_000, **kept):
    tables = tuple(Table(name=f"id{at}", rows=rows, dim=DIM) for at in range(FEATURES))
    return TableRequest(
        name="tiny-dlrm",
        model=build("tiny-dlrm", bottom=(DIM,), top_width=8, top_layers=1),
        tables=tables,
        cluster=cluster_of("h100-80gb", devices=devices),
        global_batch=global_batch,
        constraints=Constraints(kept=kept),
    )


def test_rows_move_as_the_closed_form_says():
    plan, _ = request().kept_plan()
    (traffic,) = plan.run.traffic
    row = 4 * DIM
    held = 4096 * FEATURES / 4  # by rows, each device has its part of every table
    asked = 4096 / 4 * FEATURES
    moved = held * (2 * row + row + 2 * row + 8) + asked * 2 * row
    assert traffic.memory_bytes == pytest.approx(moved)
    device = plan.run.cluster.device
    port = device.link_bytes_per_s * device.efficiency.link
    # Room of a round for each holder: a quarter more than it is asked for on average.
    room = LEAST_ROOM + -(-SLACK * asked // 4)
    rows_s, ids_s = (
        4 * room * size * 3 / 4 / port + device.efficiency.hop_s for size in (row, 4)
    )
    link = plan.run.link("data")
    assert traffic.sent_s(4, link) == pytest.approx(2 * (rows_s + ids_s))


def test_one_device_sends_nothing():
    plan, _ = request(devices=1).kept_plan()
    assert plan.run.traffic[0].exchanged_rows == 0 and not plan.time.exposed_s


def test_lookups_and_all_to_alls_are_in_the_step():
    plan, _ = request().kept_plan()
    link, device = plan.run.link("data"), plan.run.cluster.device
    assert plan.time.exposed_s["data"] > plan.run.traffic[0].sent_s(4, link)
    memory_s = plan.run.traffic[0].memory_bytes / device.memory_bytes_per_s
    assert plan.time.compute_s > memory_s
    assert (
        TableTraffic(dim=DIM, held_rows=0, asked_rows=0, exchanged_rows=0).memory_bytes
        == 0
    )


def test_longer_tables_take_memory_and_no_time():
    short, long = (request(rows=rows).kept_plan()[0] for rows in (10**6, 10**7))
    assert long.step_s == short.step_s
    grown = long.memory.table_bytes / short.memory.table_bytes
    assert grown == pytest.approx(10, rel=0.01)


def test_a_curve_of_tables_says_what_is_lost():
    curve = scaling_curve(request(devices=8, global_batch=2**16))
    assert curve.noun == "examples"
    assert [point.num_devices for point in curve.points] == [1, 2, 4, 8]
    for point in curve.points:
        assert sum(point.lost.values()) == pytest.approx(1 - point.efficiency)
    assert curve.points[-1].most_lost == "exposed on data"
    assert "all-to-alls of" in curve.points[-1].why


@pytest.mark.parametrize(
    "kept, refusal",
    [
        ({"tensor": 2}, ("plan.not_with_tables", "tensor", 2)),
        ({"remat": "full"}, ("plan.not_with_tables", "remat", "full")),
        ({"data": 2}, ("plan.data_not_all_devices", "data", 2, 4)),
    ],
)
def test_what_tables_are_not_planned_over_is_refused(kept, refusal, refuses):
    with refuses(*refusal):
        request(**kept).kept_plan()


def test_data_that_is_forbidden_is_refused_where_there_are_replicas(refuses):
    forbidden = Constraints(forbidden=frozenset({"data"}))
    with refuses("plan.data_forbidden", "data", 4):
        dataclasses.replace(request(), constraints=forbidden)
    dataclasses.replace(request(devices=1), constraints=forbidden).kept_plan()


def test_a_batch_that_does_not_divide_is_refused(refuses):
    with refuses("batch.indivisible", "global_batch", 10, 4):
        dataclasses.replace(request(), global_batch=10).kept_plan()


def test_the_command_prints_loads(capsys, refuses_command):
    words = ["plan", "--preset", "tiny-dlrm", "--devices", "2"]
    words += ["--global-batch", "64"]
    assert main([*words, "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert len(plan["loads"]) == 2 and len(plan["tables"]) == FEATURES
    assert main([*words, "--tables", "1000"]) == 0
    printed = capsys.readouterr().out
    assert "6 tables of 6,000 rows" in printed and "lookups" in printed
    wrong = [*words, "--tables", "1000,2000"]
    refuses_command(wrong, "command.wrong_number_of_tables", 2, "tiny-dlrm", FEATURES)


def test_an_estimate_takes_rows_of_tables_too(capsys):
    words = ["estimate", "--preset", "tiny-dlrm", "--layout", "data=4"]
    assert main([*words, "--global-batch", "64", "--tables", "7000"]) == 0
    assert "6 tables of 42,000 rows" in capsys.readouterr().out
