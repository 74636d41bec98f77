"""The files in infra/ agree with one another and with the program, and are what Docker and compose accept.

Kubernetes: `test_infra_kubernetes.py`. Images are built and started in `tests/integration/test_images.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml
from compose_spec import PyCompose
from typer.main import get_command

from orchestrator.cli import app
from orchestrator.embedded.prefect_server import PrefectSettings
from orchestrator.settings import Settings
from tests.compose_file import INFRA, VERSION, compose, example_env
from tests.kubernetes_objects import INSTALLATIONS, Document, one, pods

COMPOSE: Document = compose()


def commands() -> list[list[str]]:
    found = [s["command"] for s in COMPOSE["services"].values() if isinstance(s.get("command"), list)]
    found += [c["args"] for name in INSTALLATIONS for pod in pods(name) for c in pod["containers"] if "args" in c]
    for path in INFRA.glob("images/*.Dockerfile"):
        found += [
            yaml.safe_load(line.removeprefix("CMD "))
            for line in path.read_text().splitlines()
            if line.startswith("CMD [")
        ]
    return [command for command in found if command[0] == "rsi"]


def test_every_command_and_option_exists() -> None:
    assert len(commands()) >= 9
    for _, name, *arguments in commands():
        command = get_command(app).commands[name]  # type: ignore[attr-defined]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {a for a in arguments if a.startswith("--")} <= options, name


def test_every_variable_is_one_that_we_read() -> None:
    known = {"DATABASE_URL"} | {f"RSI_{name}".upper() for name in Settings.model_fields}
    known |= {f"RSI_PREFECT_{name}".upper() for name in PrefectSettings.model_fields}
    known |= {"RSI_PREFECT_AUTH_FILE"}  # the images' entrypoint
    text = "\n".join(path.read_text() for path in INFRA.rglob("*") if path.is_file())
    named = set(re.findall(r"\bRSI_[A-Z_]+[A-Z]\b", text))
    assert named - known <= {"RSI_CONSOLE_BIND"}  # compose's own
    assert named >= {
        "RSI_PREFECT_API_URL", "RSI_CONSOLE_URL", "RSI_ANONYMOUS_ROLES", "RSI_OIDC_ISSUER", "RSI_OIDC_CLIENT_SECRET_FILE",
        "RSI_WEBHOOK_URL",
    }  # fmt: skip


# --------------------------------------------------------------------------- compose


def test_compose_is_what_the_compose_specification_allows() -> None:
    PyCompose.from_json(json.dumps(COMPOSE))
    wrong = json.loads(json.dumps(COMPOSE))
    wrong["services"]["console"]["helthcheck"] = {}
    with pytest.raises(ValueError, match="helthcheck"):
        PyCompose.from_json(json.dumps(wrong))


def test_compose_refers_to_what_is_there() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        if build := service.get("build"):
            dockerfile = (INFRA / build["context"] / build["dockerfile"]).read_text()
            assert "target" not in build or f"AS {build['target']}\n" in dockerfile
        for dependency, wanted in service.get("depends_on", {}).items():
            if wanted["condition"] == "service_healthy":
                assert services[dependency]["healthcheck"]
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (INFRA / source).exists(), f"{name}: {volume}"
        secrets = {
            Path(v).name for k, v in service.get("environment", {}).items() if str(v).startswith("/run/secrets/")
        }
        assert secrets == set(service.get("secrets", [])) <= set(COMPOSE["secrets"]), name


def test_no_service_of_compose_may_more_than_it_needs() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        lifted = [o for o in service["security_opt"] if "unconfined" in o]
        assert not lifted or name in {"worker-cpu", "worker-gpu"}, name  # these make sandboxes
        assert not {"privileged", "ipc", "pid", "network_mode", "devices", "cap_add"} & set(service), name
        assert not [v for v in service["volumes"] if v.startswith(("/", "~"))] if "volumes" in service else True, name
        assert "healthcheck" in service or name == "console", name  # its image has one


def test_settings_that_compose_passes_on_stand_in_the_kubernetes_settings_too() -> None:
    passed = {k for s in COMPOSE["services"].values() for k in s.get("environment", {}) if k.startswith("RSI_")}
    settings = one("cpu", "ConfigMap", "rsi")["data"]
    with_defaults = {"RSI_OIDC_NAME", "RSI_OIDC_ROLE_CLAIM"}  # an empty one would be no default
    assert passed - with_defaults <= set(settings)
    assert passed >= {"RSI_SGLANG_WEIGHTS_URL", "RSI_SGLANG_WEIGHTS_PATH", "RSI_GPU_CLASSES"}


def test_images_have_the_version_of_the_program_everywhere() -> None:
    named = {
        (name, tag)
        for path in INFRA.rglob("*")
        if path.is_file() and "secrets" not in path.parts
        for name, tag in re.findall(r"\b(rsi-console|rsi-worker-[cg]pu):([\w.-]+)", path.read_text())
    }
    assert named == {(name, VERSION) for name in ("rsi-console", "rsi-worker-cpu", "rsi-worker-gpu")}
    assert all(VERSION in s["image"] or s["image"] == "postgres:18" for s in COMPOSE["services"].values())


def test_no_password_stands_in_compose_or_its_environment(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    for _ in range(2):  # what is there stays
        subprocess.run([INFRA / "secrets.sh", folder], check=True)
        found = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(found) == set(COMPOSE["secrets"])
    assert found["postgres_password"] in found["database_url"]
    assert len(found["postgres_password"]) == 48
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not [name for name in example_env() if "PASSWORD" in name or "AUTH" in name]


# --------------------------------------------------------------------------- images


def test_dockerfiles_pass_hadolint() -> None:
    program = Path(sysconfig.get_path("scripts")) / "hadolint"
    files = sorted(INFRA.glob("images/*.Dockerfile"))
    assert {f.name.removesuffix(".Dockerfile") for f in files} == {"cpu", "worker-gpu"}
    done = subprocess.run([program, "--no-color", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_dockerfiles_copy_what_is_there_and_do_not_run_as_root() -> None:
    kept = {
        line.removeprefix("!") for line in (INFRA.parent / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    for path in INFRA.glob("images/*.Dockerfile"):
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert lines[0].startswith("ARG BASE_IMAGE=")
        assert [line for line in lines if line.startswith("USER ")][-1] == "USER 10001"
        copied = [n for line in lines if line.startswith("COPY ") and "--from" not in line for n in line.split()[1:-1]]
        assert all((INFRA.parent / name).exists() for name in copied)
        assert all(any(name == k or name.startswith(f"{k}/") for k in kept) for name in copied)


def test_entrypoint_reads_secrets_from_files(tmp_path: Path) -> None:
    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [INFRA / "images/entrypoint.sh", "sh", "-c", 'echo "$DATABASE_URL|${RSI_WEBHOOK_SECRET:-}|$RSI_WEBHOOK_SECRET_FILE"'],
            env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    secret = tmp_path / "url"
    secret.write_text("postgresql://a b$c'd\"@h/x\n")
    done = run(DATABASE_URL_FILE=str(secret), RSI_WEBHOOK_SECRET_FILE="secrets/webhook")
    assert done.stdout == "postgresql://a b$c'd\"@h/x||secrets/webhook\n"
    refused = run(DATABASE_URL_FILE=str(tmp_path / "none"))
    assert refused.returncode == 2
    assert "DATABASE_URL_FILE names" in refused.stderr
