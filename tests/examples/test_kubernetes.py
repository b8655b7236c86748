# SPDX-License-Identifier: Apache-2.0
"""The manifests of examples/kubernetes against the schemas of Kubernetes and Kubeflow Trainer, and the image's recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
yaml = pytest.importorskip("yaml")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "examples/kubernetes" / name).read_text(encoding="utf-8")))


def image_path(path: str) -> Path:
    """Return the file of this repository that lies at ``path`` in the image."""
    return ROOT / path.removeprefix("/opt/zeropp/")


def test_the_job_fits_the_schema_of_kubernetes():
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents("job.yaml"):
        validate.validate(document, validate.latest_version(), strict=True)
    broken = documents("job.yaml")[1]
    broken["spec"]["completionModus"] = "Indexed"
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, validate.latest_version(), strict=True)


def test_the_trainjob_fits_the_schema_of_kubeflow():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (document,) = documents("trainjob.yaml")
    read = models.TrainerV1alpha1TrainJob.from_dict(document)
    assert read.to_dict() == document  # a field that the schema does not know would be left out


def test_every_machine_of_the_job_is_counted_alike():
    service, job = documents("job.yaml")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    command = [*container["command"], *container["args"]]
    assert spec["completions"] == spec["parallelism"] == 2
    assert f"--nnodes={spec['completions']}" in command
    assert f"--master-addr={job['metadata']['name']}-0.{pod['subdomain']}" in command
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("name", ["job.yaml", "trainjob.yaml"])
def test_the_scripts_of_the_manifests_exist(name):
    text = (ROOT / "examples/kubernetes" / name).read_text(encoding="utf-8")
    scripts = re.findall(r"/opt/zeropp/[\w/]+\.py", text)
    assert scripts
    assert all(image_path(script).is_file() for script in scripts)


def test_the_image_compiles_kernels_with_the_compiler_of_the_extra():
    recipe = (ROOT / "examples/Dockerfile").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(r"^cuda = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)
    assert extra
    wanted = set(re.findall(r'"(nvidia-[^"]+)"', extra.group(1)))
    assert set(re.findall(r'"(nvidia-[^"]+)"', recipe)) == wanted
    assert re.findall(r"^FROM \S+ AS (\w+)$", recipe, re.MULTILINE) == ["wheel", "cpu", "cuda"]
