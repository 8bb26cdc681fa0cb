"""The SLURM script and the JobSet manifest say what the command understands."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from meshpar import Layout
from meshpar.recipes.options import parse_arguments

CLUSTER = Path(__file__).parents[1] / "recipes" / "cluster"
SCRIPT = (CLUSTER / "train.sbatch").read_text()
MANIFEST = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())

# Of sbatch(1), those that the script uses: option -> what its value looks like.
SBATCH = {
    "job-name": r"[\w.-]+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "cpus-per-task": r"\d+",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
    "output": r"[\w%./-]+",
    "open-mode": r"append|truncate",
    "requeue": "",
    "signal": r"([RB]{1,2}:)?[A-Z0-9]+(@\d+)?",
}


def test_every_line_for_sbatch_is_an_option_with_a_value_of_its_kind():
    lines = re.findall(r"^#SBATCH (.*)$", SCRIPT, re.MULTILINE)
    found = [re.fullmatch(r"--([a-z-]+)(?:=(\S+))?", line) for line in lines]
    assert all(found), lines
    for option in found:
        assert re.fullmatch(SBATCH[option[1]], option[2] or ""), option[0]
    body = SCRIPT.index("set -u")
    assert SCRIPT.startswith("#!/bin/bash\n") and SCRIPT.rindex("#SBATCH") < body


def test_the_script_is_bash():
    checked = subprocess.run(
        ["bash", "-n"], input=SCRIPT, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


def words_of_script():
    """What follows `meshpar train` in the script."""
    command = re.search(r"meshpar train \\\n(.*?[^\\])\n", SCRIPT, re.DOTALL)[1]
    return shlex.split(command.replace("\\\n", " "))


def words_of_manifest():
    """Arguments of the container, its variable as Kubernetes puts it in."""
    (container,) = pod()["containers"]
    assert container["command"] == ["meshpar", "train"]
    return [word.replace("$(JOB_COMPLETION_INDEX)", "3") for word in container["args"]]


def job():
    (replicated,) = MANIFEST["spec"]["replicatedJobs"]
    return replicated


def pod():
    return job()["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("words", [words_of_script, words_of_manifest])
def test_the_command_understands_its_options(words):
    config = parse_arguments(words())
    assert config.resume == "auto" and config.emulate == 0
    layout = Layout.parse(config.layout).resolve(32)
    assert config.global_batch % layout.batch_shards == 0


@pytest.mark.parametrize(
    ("status", "restarts", "is_queued"),
    [(0, "0", False), (1, "0", False), (2, "0", False)]
    + [(one, "0", True) for one in (75, 134, 137, 139, 143)]
    + [(75, "99", True), (75, "100", False)],
)
def test_the_script_is_queued_again_after_all_that_may_pass_but_not_for_ever(
    status, restarts, is_queued
):
    commands = f"""
        srun() {{ return {status}; }}
        scontrol() {{ echo "$@"; }}
    """
    ended = subprocess.run(
        ["bash"],
        input=commands + SCRIPT,
        env={
            **{"OUT": "run", "TEXT": "text", "SLURM_JOB_ID": "7"},
            "SLURM_RESTART_COUNT": restarts,
        },
        capture_output=True,
        text=True,
    )
    assert ended.returncode == status, ended.stderr
    assert ended.stdout == "requeue 7\n" * is_queued


def test_srun_leaves_processes_the_time_to_end_with_their_own_status():
    words = shlex.split(re.search(r"^srun (.*) \\\n", SCRIPT, re.MULTILINE)[1])
    assert words == ["--kill-on-bad-exit=0", "--wait=120"]


INT_OR_TEXT = (int, str)
QUANTITIES = {...: INT_OR_TEXT}
VOLUME_MOUNT = {"name!": str, "mountPath!": str, "readOnly": bool, "subPath": str}
CONTAINER = {
    "name!": str,
    "image!": str,
    "command": [str],
    "args": [str],
    "env": [
        {"name!": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath!": str}}}
    ],
    "ports": [{"containerPort!": int, "name": str, "protocol": str}],
    "resources": {"limits": QUANTITIES, "requests": QUANTITIES},
    "volumeMounts": [VOLUME_MOUNT],
    "workingDir": str,
}
POD = {
    "containers!": [CONTAINER],
    "restartPolicy!": ("Never", "OnFailure"),
    "terminationGracePeriodSeconds": int,
    "nodeSelector": {...: str},
    "serviceAccountName": str,
    "volumes": [
        {
            "name!": str,
            "persistentVolumeClaim": {"claimName!": str, "readOnly": bool},
            "emptyDir": {"medium": str, "sizeLimit": INT_OR_TEXT},
        }
    ],
}
EXIT_CODES = {
    "containerName": str,
    "operator!": ("In", "NotIn"),
    "values!": [int],
}
JOB = {
    "completionMode": ("Indexed", "NonIndexed"),
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "activeDeadlineSeconds": int,
    "podFailurePolicy": {
        "rules!": [
            {
                "action!": ("FailJob", "FailIndex", "Ignore", "Count"),
                "onExitCodes": EXIT_CODES,
            }
        ]
    },
    "template!": {"metadata": {...: object}, "spec!": POD},
}
JOBSET = {
    "apiVersion!": ("jobset.x-k8s.io/v1alpha2",),
    "kind!": ("JobSet",),
    "metadata!": {"name!": str, "namespace": str, "labels": {...: str}},
    "spec!": {
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [
                {
                    "name": str,
                    "action!": (
                        "FailJobSet",
                        "RestartJobSet",
                        "RestartJobSetAndIgnoreMaxRestarts",
                    ),
                    "onJobFailureReasons": [str],
                    "targetReplicatedJobs": [str],
                }
            ],
        },
        "network": {
            "enableDNSHostnames": bool,
            "subdomain": str,
            "publishNotReadyAddresses": bool,
        },
        "replicatedJobs!": [
            {
                "name!": str,
                "replicas": int,
                "template!": {"metadata": {...: object}, "spec!": JOB},
            }
        ],
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
    },
}
"""Fields and kinds of values of the JobSet API (v1alpha2) and of what it is made of in
Kubernetes' API reference (batch/v1 Job, core/v1 Pod), as far as a training needs them;
`!` marks those that must be there, `...` any name."""


def problems(value, schema, path=""):
    """What of a manifest its schema does not know, or lacks."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{path} is no mapping"]
        kinds = {str(name).rstrip("!"): kind for name, kind in schema.items()}
        missing = {name[:-1] for name in schema if str(name)[-1] == "!"} - set(value)
        found = [f"{path} lacks {name}" for name in sorted(missing)]
        for name, inner in value.items():
            kind = kinds.get(name, schema.get(...))
            here = f"{path}.{name}"
            found += problems(inner, kind, here) if kind else [f"no field {here}"]
        return found
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{path} is no list"]
        each = [problems(one, schema[0], f"{path}[{n}]") for n, one in enumerate(value)]
        return [problem for found in each for problem in found]
    if isinstance(schema, tuple) and isinstance(schema[0], str):
        return [] if value in schema else [f"{path}={value!r}: none of {schema}"]
    if schema is object:
        return []
    # To Python a bool is a number.
    right = isinstance(value, schema) and isinstance(value, bool) == (schema is bool)
    return [] if right else [f"{path}={value!r}: not {schema}"]


def test_the_manifest_has_no_field_or_value_that_its_schema_does_not_know():
    assert problems(MANIFEST, JOBSET) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("backoffLimit: 0", "backOffLimit: 0", "no field .*backOffLimit"),
        ("completions: 4", "completions: four", "completions='four': not"),
        ("restartPolicy: Never", "restartPolicy: Always", "restartPolicy='Always'"),
        ("claimName: data", "claim: data", "lacks claimName"),
        ("action: FailJobSet", "action: FailJob", "rules.0..action='FailJob'"),
        ("enableDNSHostnames: true", "enableDNSHostnames: 1", "Hostnames=1: not"),
    ],
)
def test_the_schema_finds_a_slip(old, new, problem):
    text = (CLUSTER / "jobset.yaml").read_text()
    assert text.count(old) == 1
    found = problems(yaml.safe_load(text.replace(old, new)), JOBSET)
    assert any(re.search(problem, one) for one in found), found


def test_the_manifest_has_what_a_jobset_and_its_job_must_have():
    assert MANIFEST["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert MANIFEST["kind"] == "JobSet"
    assert set(MANIFEST["spec"]) == {"failurePolicy", "network", "replicatedJobs"}
    (rule,) = MANIFEST["spec"]["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    spec = job()["template"]["spec"]
    (policy,) = spec["podFailurePolicy"]["rules"]
    assert policy["onExitCodes"]["values"] == [2]  # Of bad input.
    assert spec["completionMode"] == "Indexed"
    assert spec["backoffLimit"] == 0 and pod()["restartPolicy"] == "Never"
    mounted = {one["name"] for one in pod()["containers"][0]["volumeMounts"]}
    assert mounted == {one["name"] for one in pod()["volumes"]}
    for name in (MANIFEST["metadata"]["name"], job()["name"]):
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name)  # RFC 1123


def test_all_pods_look_for_pod_0_where_the_jobset_names_it():
    config = parse_arguments(words_of_manifest())
    spec, names = job()["template"]["spec"], MANIFEST["spec"]["network"]
    assert config.num_processes == spec["completions"] == spec["parallelism"]
    host, port = config.coordinator.split(":")
    jobset, replicated = MANIFEST["metadata"]["name"], job()["name"]
    assert host == f"{jobset}-{replicated}-0-0.{names['subdomain']}"
    (container,) = pod()["containers"]
    assert [int(port)] == [one["containerPort"] for one in container["ports"]]
    (variable,) = container["env"]
    assert variable["name"] == "JOB_COMPLETION_INDEX"
