"""Manifests, chart, image and unit, checked without a cluster: by schemas, and every flag by kvstored itself."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.daemon.config import Config, load, parse_size

PLACE = re.compile(r"\{\{ \.(Values|Release)\.(\w+) \}\}")
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


@pytest.fixture(scope="module")
def deploy(root: Path) -> Path:
    return root / "deploy"


def rendered(chart: Path) -> str:
    """The chart's template with its values: it holds plain places only, which mean the same to helm."""
    values = yaml.safe_load((chart / "values.yaml").read_text())
    text = (chart / "templates/daemonset.yaml").read_text()
    found = {("Values", name): str(value) for name, value in values.items()} | {("Release", "Name"): "kvstored"}
    assert set(PLACE.findall(text)) == set(found)
    text = PLACE.sub(lambda place: found[place[1], place[2]], text)
    assert "{{" not in text
    return text


def manifests(deploy: Path) -> list[dict[str, Any]]:
    texts = [path.read_text() for path in sorted((deploy / "kubernetes").glob("*.yaml"))]
    return [yaml.safe_load(text) for text in (*texts, rendered(deploy / "helm/kvstore"))]


def pods(deploy: Path) -> list[dict[str, Any]]:
    return [m["spec"] if m["kind"] == "Pod" else m["spec"]["template"]["spec"] for m in manifests(deploy)]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_manifests_and_chart_fit_the_schemas_of_kubernetes(deploy: Path, version: str) -> None:
    for manifest in manifests(deploy):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schemas_find_a_wrong_field(deploy: Path) -> None:
    wrong = manifests(deploy)[0]
    wrong["spec"]["replicas_of_it"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.34", strict=True)


def test_the_chart_s_defaults_are_the_manifest(deploy: Path) -> None:
    assert yaml.safe_load((deploy / "kubernetes/daemonset.yaml").read_text()) == yaml.safe_load(
        rendered(deploy / "helm/kvstore")
    )


def test_every_container_runs_without_rights_and_with_limits(deploy: Path) -> None:
    for pod in pods(deploy):
        assert pod["automountServiceAccountToken"] is False
        for container in containers(pod):
            security = {**pod["securityContext"], **container["securityContext"]}
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert container["resources"]["limits"]["memory"]
            if container["name"] != "folders":
                assert security["runAsNonRoot"] is True
                assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)


def daemons(deploy: Path) -> list[tuple[dict[str, Any], dict[str, Any], Config]]:
    """Each kvstored: its pod, its container, and the configuration that its flags give."""
    found = []
    for pod in pods(deploy):
        for container in containers(pod):
            if container["name"] == "kvstored":
                flags = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])
                values = {name.replace("-", "_"): value for name, value in flags.items()}
                found.append((pod, container, load(None, dict(values))))
    return found


def test_every_flag_is_one_of_kvstored_and_sizes_fit(deploy: Path) -> None:
    found = daemons(deploy)
    assert len(found) == 3
    for pod, container, config in found:
        limit = container["resources"]["limits"]["memory"]
        assert int(limit[:-2]) * UNITS[limit[-2:]] >= config.device + config.host + parse_size("4 GiB")
        assert pod["terminationGracePeriodSeconds"] > config.drain_timeout_s
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert str(config.socket.parent) in mounts
        assert any(str(config.ssd_dir).startswith(f"{mount}/") for mount in mounts)
        assert config.metrics_address == ("0.0.0.0", container["ports"][0]["containerPort"])


def test_engine_and_daemon_of_a_pod_share_the_folder_of_the_socket(deploy: Path) -> None:
    pod = yaml.safe_load((deploy / "kubernetes/sidecar.yaml").read_text())["spec"]
    for container in containers(pod):
        assert {"name": "run", "mountPath": "/run/kvstore"} in container["volumeMounts"]
    assert next(volume for volume in pod["volumes"] if volume["name"] == "run")["emptyDir"]


def test_the_image_is_built_in_stages_and_does_not_run_as_root(deploy: Path) -> None:
    text = (deploy / "Dockerfile").read_text()
    stages = text.split("\nFROM ")
    assert len(stages) == 3
    assert "USER 10001:10001" in stages[2]
    assert "g++" not in stages[2]
    assert "COPY --from=build /opt/kvstore /opt/kvstore" in stages[2]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_is_one(deploy: Path, tmp_path: Path) -> None:
    unit = tmp_path / "kvstored.service"
    text = (deploy / "systemd/kvstored.service").read_text()
    # What it starts is not installed where the tests run.
    unit.write_text(text.replace("/opt/kvstore/bin/kvstored", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    mine = [line for line in done.stderr.splitlines() if "kvstored.service" in line]
    assert (mine, done.returncode) == ([], 0)


def test_the_table_of_sizes_is_what_layouts_say(root: Path) -> None:
    text = (root / "docs/operations.md").read_text().partition("### Sizing")[2].partition("###")[0]
    rows = re.findall(r"^\| [^|]+ \| ([\d, |]+) \|$", text, re.MULTILINE)
    assert len(rows) == 6
    for row in rows:
        layers, heads, size, nbytes, raw, coded = (int(cell.replace(",", "")) for cell in row.split("|"))
        assert nbytes == 2 * layers * heads * size * 2
        for codec, told in (("raw", raw), ("int8", coded)):
            spec = NamespaceSpec(
                model="m", dtype="float16", layers=layers, kv_heads=heads, head_dim=size, block_tokens=64, codec=codec
            )
            assert (1 << 30) // BlockLayout.of(spec).stored_bytes * 64 == told
