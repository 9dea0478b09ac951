"""What operators deploy is true of the program: metrics that are queried exist, so do files, commands and options."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclopts import CycloptsError
from prometheus_client.parser import text_string_to_metric_families

from specserve.cli.main import COMMANDS, build_app
from specserve.errors import ConfigError
from specserve.server.http.routes import ROUTES
from specserve.server.metrics import Metrics
from specserve.server.options import ServeOptions
from specserve.types import Event, SequenceStats

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/specserve.json").read_text("utf-8"))
INSTRUCTIONS = {
    "ARG", "FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK",
    "ENTRYPOINT", "CMD",
}  # fmt: skip


# --- Grafana ----------------------------------------------------------------------------------------------------------


def exposed() -> dict[str, set[str]]:
    """Every sample's name, with its labels."""
    metrics = Metrics("m")
    metrics.begin("1", 1, 1)
    stats = SequenceStats(
        arrived=1.0,
        first_scheduled=1.0,
        first_token=1.0,
        finished=2.0,
        num_steps=1,
        num_drafts=1,
        num_draft_tokens=1,
        num_accepted_tokens=1,
        accepted_by_position=[1],
        drafted_by_position=[1],
        drafter="ngram",
    )
    metrics.notify(Event("1", 0, [1], finish_reason="stop", stats=stats))
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.exposition(None, 0, True).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def queries(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every expression and what its legend shows; those of variables too."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"], ""


def wrong_queries(dashboard: Mapping[str, Any], known: Mapping[str, set[str]]) -> list[str]:
    """Names of metrics and labels that nobody exposes. Metrics are told by their colon and by a selector behind them;
    labels stand in selectors, in parentheses after by and ignoring, in label_values and in legends."""
    wrong = []
    for query, legend in queries(dashboard):
        plain = re.sub(r'"[^"]*"', '""', query)
        names = set(re.findall(r"[a-zA-Z_]\w*:\w+", plain)) | set(re.findall(r"([a-zA-Z_][\w:]*)\s*[{\[]", plain))
        wrong += [name for name in names if name not in known]
        groups = re.findall(r"\b(?:by|without|ignoring|on)\s*\(([^)]*)\)", plain)
        labels = {part.strip() for group in groups for part in group.split(",")}
        labels |= {key for inside in re.findall(r"{([^}]*)}", plain) for key in re.findall(r"(\w+)\s*[=!]", inside)}
        labels |= set(re.findall(r"label_values\([^,]+,\s*(\w+)\)", plain)) | set(re.findall(r"{{(\w+)}}", legend))
        allowed = set().union(*(known.get(name, set()) for name in names))
        wrong += [f"{label} in {query}" for label in labels - {""} - allowed]
        if not names:
            wrong.append(f"no metric in {query}")
    return wrong


def test_every_query_finds_its_metric() -> None:
    assert len(list(queries(DASHBOARD))) > 25
    assert wrong_queries(DASHBOARD, exposed()) == []


@pytest.mark.parametrize(
    ("query", "legend", "wrong"),
    [
        ("rate(specserve:generation_tokens[1m])", "", "specserve:generation_tokens"),  # without _total
        ("sum(vllm:no_such_thing)", "", "vllm:no_such_thing"),
        ("go_goroutines{}", "", "go_goroutines"),
        ('specserve:up{model="x"}', "", "model in "),
        ("sum by (drafter) (specserve:up)", "", "drafter in "),
        ("specserve:up", "{{phase}}", "phase in "),
        ("sum(1)", "", "no metric in "),
    ],
)
def test_wrong_queries_are_noticed(query: str, legend: str, wrong: str) -> None:
    target = {"expr": query, "legendFormat": legend}
    dashboard = {"panels": [{"targets": [target]}], "templating": {"list": []}}
    (found,) = wrong_queries(dashboard, exposed())
    assert found.startswith(wrong)


def test_the_dashboard_is_whole() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] for panel in panels)
    assert all(panel["description"] and panel["targets"] for panel in panels if panel["type"] != "row")
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(panels)))
    assert used == variables == {"datasource", "model"}


def test_no_two_panels_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


# --- Docker -----------------------------------------------------------------------------------------------------------


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions with their arguments, continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(parts[0], parts[1].strip()) for parts in found]


def dockerfile_faults(text: str, root: Path, commands: set[str]) -> list[str]:
    """What would fail or be unsafe."""
    found = instructions(text)
    faults = [f"unknown instruction {name}" for name, _ in found if name not in INSTRUCTIONS]
    for argument in (argument for name, argument in found if name == "COPY" and "--from=" not in argument):
        *sources, _ = argument.split()
        faults += [f"{source} does not exist" for source in sources if not (root / source).exists()]
    stages = [i for i, (name, _) in enumerate(found) if name == "FROM"]
    faults += [f"{argument} is no plain image" for name, argument in found if name == "FROM" and "/" in argument]
    last = dict(found[stages[-1] :])
    if last.get("USER", "root").split(":")[0] in ("root", "0"):
        faults.append("runs as root")
    if "/health" not in last.get("HEALTHCHECK", ""):
        faults.append("no health check")
    if json.loads(last["ENTRYPOINT"]) != ["specserve"] or json.loads(last["CMD"])[0] not in commands:
        faults.append("CMD is none of the commands")
    return faults


DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
IMAGES = {name: (DEPLOY / name).read_text("utf-8") for name in ("Dockerfile", "Dockerfile.cuda")}
each_image = pytest.mark.parametrize("image", IMAGES)


@each_image
def test_the_image_is_sound(image: str) -> None:
    assert dockerfile_faults(IMAGES[image], ROOT, set(COMMANDS)) == []


def test_the_image_for_gpus_is_that_for_cpus_with_what_triton_needs() -> None:
    plain, cuda = (instructions(text) for text in IMAGES.values())
    assert [each for each in plain if each not in cuda] == [each for each in plain if each[0] in ("ENV", "CMD")]
    (compiler,) = (argument for name, argument in cuda if (name, argument) not in plain and name == "RUN")
    assert "gcc" in compiler
    (environment,) = (argument for name, argument in cuda if name == "ENV")
    words = dict(word.split("=", 1) for word in shlex.split(environment))
    assert words["TRITON_CACHE_DIR"].startswith("/models/")
    assert words["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    (command,) = (json.loads(argument) for name, argument in cuda if name == "CMD")
    _, bound, _ = build_app().parse_args(command, print_error=False, exit_on_error=False)
    assert bound.arguments["engine"].device == "cuda"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("COPY drafters", "COPY drafter", "drafter does not exist"),
        ("USER 10001:10001", "USER root", "runs as root"),
        ("USER 10001:10001", "", "runs as root"),
        ("USER 10001:10001", "USER 0:0", "runs as root"),
        ("/health", "/healthz-", "no health check"),
        ('CMD ["serve"', 'CMD ["server"', "CMD is none of the commands"),
        ("VOLUME /models", "VOLUMES /models", "unknown instruction VOLUMES"),
        ("FROM python:", "FROM example.org/python:", "is no plain image"),
    ],
)
def test_faults_of_an_image_are_noticed(old: str, new: str, fault: str) -> None:
    assert old in DOCKERFILE
    text = DOCKERFILE.replace(old, new).replace("/healthz-", "/alive")
    assert any(fault in each for each in dockerfile_faults(text, ROOT, set(COMMANDS)))


@each_image
def test_the_image_has_stages_and_keeps_models(image: str) -> None:
    found = instructions(IMAGES[image])
    assert [name for name, _ in found].count("FROM") == 2
    volume = next(argument for name, argument in found if name == "VOLUME")
    environment = next(argument for name, argument in found if name == "ENV")
    kept = [word.split("=")[1] for word in shlex.split(environment) if re.match("SPECSERVE_HOME|HF_HOME", word)]
    assert len(kept) == 2
    assert all(folder.startswith(f"{volume}/") for folder in kept)


def test_the_health_check_is_python() -> None:
    (check,) = (argument for name, argument in instructions(DOCKERFILE) if name == "HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "HEALTHCHECK", "exec")


@each_image
def test_the_image_holds_all_that_is_packaged(image: str) -> None:
    """Folders that the wheel is made of, the same torch, and nothing that the build context leaves out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    folders = project["tool"]["scikit-build"]["wheel"]["packages"].values()
    copies = [argument.split() for name, argument in instructions(IMAGES[image]) if name == "COPY"]
    copied = {source for words in copies if "--from=build" not in words for source in words[:-1]}
    assert {folder for folder in folders if any((ROOT / folder).glob("*.py"))} <= copied
    licences = {name for name in project["project"]["license-files"] if name.partition("/")[0] not in copied}
    assert {project["project"]["readme"], *licences, "pyproject.toml"} <= copied
    (torch,) = (each for each in project["project"]["dependencies"] if each.startswith("torch>"))
    assert f'"{torch}"' in IMAGES[image]
    ignored = (DEPLOY / f"{image}.dockerignore").read_text("utf-8").splitlines()
    assert ignored.index("*") < min(i for i, line in enumerate(ignored) if line.startswith("!"))
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "docker-compose.yml").read_text("utf-8"))


def test_compose_has_the_server_and_who_watches_it() -> None:
    services = compose()["services"]
    assert set(services) == {"specserve", "prometheus", "grafana"}
    assert services["specserve"]["command"][0] in set(COMMANDS)
    assert (DEPLOY / services["specserve"]["build"]["context"]).resolve() == ROOT
    assert (ROOT / services["specserve"]["build"]["dockerfile"]).is_file()
    args = services["specserve"]["build"]["args"]
    assert all(("ARG", f'{name}=""') in instructions(DOCKERFILE) for name in args)
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["cap_drop"] == ["ALL"]
        assert "privileged" not in service


def test_compose_mounts_what_is_there() -> None:
    known = set(compose()["volumes"])
    for service in compose()["services"].values():
        for mount in service["volumes"]:
            source, target, *mode = mount.split(":")
            assert target.startswith("/")
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
                assert mode == ["ro"]
            else:
                assert source in known
                known.add(source)


def kubernetes() -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8"))}


def test_kubernetes_asks_what_it_acts_on() -> None:
    """A server that loads or starts its engine again lives on and gets no requests; nobody needs a key to ask."""
    pod = kubernetes()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    paths = {kind: container[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/live", "livenessProbe": "/live", "readinessProbe": "/ready"}
    replies = {route.path: set(route.replies) for route in ROUTES if not route.needs_key}
    assert (replies["/live"], replies["/ready"]) == ({200, 503}, {200, 503})  # 503: no restart of an engine helps
    (port,) = container["ports"]
    assert {container[kind]["httpGet"]["port"] for kind in paths} == {port["name"]}
    assert port["containerPort"] == ServeOptions().port
    assert container["args"][0] in set(COMMANDS)
    assert pod["terminationGracePeriodSeconds"] > ServeOptions().drain_timeout_s


def test_kubernetes_names_what_is_there() -> None:
    made = kubernetes()
    deployment, service = made["Deployment"]["spec"], made["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    assert [each["targetPort"] for each in service["ports"]] == [each["name"] for each in container["ports"]]
    assert [each["name"] for each in pod["volumes"]] == [each["name"] for each in container["volumeMounts"]]
    claims = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert claims == [made["PersistentVolumeClaim"]["metadata"]["name"]]
    kept = next(argument for name, argument in instructions(DOCKERFILE) if name == "VOLUME")
    assert kept in [each["mountPath"] for each in container["volumeMounts"]]


def test_kubernetes_gives_no_rights() -> None:
    pod = kubernetes()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    user = dict(instructions(DOCKERFILE))["USER"]
    assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == user
    assert pod["securityContext"]["runAsNonRoot"] is container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is pod["automountServiceAccountToken"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def kuberay() -> tuple[dict[str, Any], dict[str, Any]]:
    """The cluster and the service."""
    cluster, service = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text("utf-8"))
    return cluster, service


def ray_pods() -> dict[str, dict[str, Any]]:
    """Of the head and of workers, what they run."""
    spec = kuberay()[0]["spec"]
    (workers,) = spec["workerGroupSpecs"]
    return {"head": spec["headGroupSpec"]["template"]["spec"], "worker": workers["template"]["spec"]}


def serve_command() -> list[str]:
    """The words of the server's command, after Ray was started."""
    (container,) = ray_pods()["head"]["containers"]
    (script,) = container["args"]
    return shlex.split(script.split("exec ")[1])


def test_the_ray_cluster_has_room_for_the_engines_that_the_server_asks_for() -> None:
    program, *words = serve_command()
    assert program == "specserve"
    command, bound, _ = build_app().parse_args(words, print_error=False, exit_on_error=False)
    scale, engine = bound.arguments["scale"], bound.arguments["engine"]
    assert command.__name__ == "serve"
    assert scale.backend == "ray" and scale.scaling.least > 1
    cluster, _ = kuberay()
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    (container,) = ray_pods()["worker"]["containers"]
    for_one = engine.threads * engine.tensor_parallel_size
    assert workers["replicas"] * (int(container["resources"]["limits"]["cpu"]) // for_one) >= scale.scaling.most
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_faults_of_the_server_on_ray_are_noticed() -> None:
    words = serve_command()[1:]
    for old, new in (("ray", "rays"), ("--min-replicas", "--min-replica"), ("2", "5")):
        with pytest.raises((CycloptsError, ConfigError)):
            wrong = [new if word == old else word for word in words]
            build_app().parse_args(wrong, print_error=False, exit_on_error=False)


def test_the_ray_cluster_is_reached_and_asked_where_it_answers() -> None:
    cluster, service = kuberay()
    template = cluster["spec"]["headGroupSpec"]["template"]
    (container,) = template["spec"]["containers"]
    assert service["spec"]["selector"] == template["metadata"]["labels"]
    assert [each["targetPort"] for each in service["spec"]["ports"]] == ["http"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports["http"] == ServeOptions().port
    assert container["startupProbe"]["httpGet"]["path"] == "/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert template["spec"]["terminationGracePeriodSeconds"] > ServeOptions().drain_timeout_s
    head = f"127.0.0.1:{ports['gcs-server']}"
    words = serve_command()
    assert words[words.index("--ray-address") + 1] == head == container["livenessProbe"]["exec"]["command"][-1]
    assert f"ray health-check --address {head}" in container["args"][0]


@pytest.mark.parametrize("pod", ["head", "worker"])
def test_the_ray_cluster_gives_no_rights_and_runs_one_image(pod: str) -> None:
    spec = ray_pods()[pod]
    (container,) = spec["containers"]
    user = spec["securityContext"]
    assert f"{user['runAsUser']}:{user['runAsGroup']}" == dict(instructions(DOCKERFILE))["USER"]
    assert user["runAsNonRoot"] is container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is spec["automountServiceAccountToken"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["image"] == "specserve-ray"
    assert "$KUBERAY_GEN_RAY_START_CMD" in container["args"][0]
    assert [each["name"] for each in spec["volumes"]] == [each["name"] for each in container["volumeMounts"]]
    assert ("ARG", 'EXTRAS=""') in instructions(DOCKERFILE)


def test_prometheus_scrapes_the_server() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    ((target,),) = (config["targets"] for config in job["static_configs"])
    host, port = target.split(":")
    ports = compose()["services"][host]["ports"]
    assert job["metrics_path"] == "/metrics"
    assert [each.split(":")[-1] for each in ports] == [port]


def test_grafana_finds_its_source_and_its_dashboard() -> None:
    folder = DEPLOY / "grafana/provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yml").read_text("utf-8"))["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    services = compose()["services"]
    assert [each.split(":")[-1] for each in services[host]["ports"]] == [port]
    (provider,) = yaml.safe_load((folder / "dashboards/specserve.yml").read_text("utf-8"))["providers"]
    mounts = [mount.split(":") for mount in services["grafana"]["volumes"]]
    (target,) = (mount[1] for mount in mounts if mount[0].endswith("specserve.json"))
    assert target.startswith(provider["options"]["path"] + "/")
    environment = services["grafana"]["environment"]
    assert environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == target
    assert all(isinstance(value, str) for value in environment.values())


# --- systemd ----------------------------------------------------------------------------------------------------------

UNIT = DEPLOY / "specserve.service"


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text("utf-8"))
    return parser


def test_the_unit_serves_drains_and_restarts() -> None:
    service = unit()["Service"]
    program, command, *_ = shlex.split(service["ExecStart"])
    assert (Path(program).name, command in set(COMMANDS)) == ("specserve", True)
    assert (service["KillSignal"], service["Restart"], service["DynamicUser"]) == ("SIGTERM", "on-failure", "yes")
    # The engine is a process of its own: a SIGTERM to the whole group would end it under the requests that drain.
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) >= 30
    assert {"AF_UNIX", "AF_INET"} <= set(service["RestrictAddressFamilies"].split())  # the engine's socket, and clients
    assert f"SPECSERVE_HOME=%C/{service['CacheDirectory']}/" in service["Environment"]


@pytest.mark.parametrize(
    "name",
    ["NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "ProtectKernelTunables", "RestrictNamespaces"],
)
def test_the_unit_is_hardened(name: str) -> None:
    assert unit()["Service"][name] == "yes"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With a program that is there; and it does look: a misspelt setting is told."""
    text = UNIT.read_text("utf-8").replace("/opt/specserve/bin/specserve", "/bin/sh")
    assert "/bin/sh serve" in text
    assert verify(tmp_path / "specserve.service", text) == ""
    assert "NoNewPrivilege" in verify(tmp_path / "wrong.service", text.replace("NoNewPrivileges", "NoNewPrivilege"))


def verify(path: Path, text: str) -> str:
    """What systemd says against a unit."""
    path.write_text(text, "utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60
    )
    return "\n".join(line for line in (done.stdout + done.stderr).splitlines() if path.name in line)
