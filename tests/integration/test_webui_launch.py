"""The launch form on a real store: what is shown, what is refused with nothing created, what a clone starts from."""

from __future__ import annotations

import html as markup
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import models as m
from orchestrator import workers
from orchestrator.inputs import shipped_model
from orchestrator.launch import create_cycle
from orchestrator.recipes import load_recipe, recipe_names
from orchestrator.store import Store
from stages.errors import ServiceError
from tests import factories
from tests.console_people import SignedIn, app_for, client_as
from webui.forms.fields import kind_of, read, written
from webui.forms.launch import fill, groups, start


@pytest.fixture(scope="module")
def store(module_store: Store) -> Store:
    return module_store


@pytest.fixture(scope="module")
def lead(store: Store) -> Iterator[SignedIn]:
    with client_as(app_for(store), m.Role.LEAD, login="ada") as client:
        yield client


@pytest.fixture
def nothing_new(store: Store, submitted: list[int]) -> Iterator[None]:
    """The test must create no cycle and ask for none."""
    before = cycles(store)
    yield
    assert (cycles(store), submitted) == (before, [])


def sent(page: str) -> dict[str, str]:
    """What a browser would send for the form of a page."""
    form = re.search(r'<form id="launch".*?</form>', page, re.S)
    assert form is not None
    values = {}
    for tag in re.findall(r"<input[^>]*>", form.group()):
        name, value = re.search(r'name="([^"]*)"', tag), re.search(r'value="([^"]*)"', tag)
        assert name is not None
        values[name.group(1)] = markup.unescape(value.group(1)) if value else ""
    for name, options in re.findall(r'<select[^>]* name="([^"]*)"[^>]*>(.*?)</select>', form.group(), re.S):
        chosen = re.search(r'<option value="([^"]*)" selected', options)
        values[name] = chosen.group(1) if chosen else ""
    for name, text in re.findall(r'<textarea[^>]* name="([^"]*)"[^>]*>(.*?)</textarea>', form.group(), re.S):
        values[name] = markup.unescape(text)
    return values


def cycles(store: Store) -> list[int]:
    return [c.id or 0 for c in store.cycles.list(limit=200).items]


# ------------------------------------------------------------------------------------------------------------- fields


@pytest.mark.parametrize("recipe", recipe_names())
def test_an_untouched_form_is_the_recipe_exactly(recipe: str) -> None:
    source = load_recipe(recipe)
    form = {f.path: f.value for g in groups(start(source)) for f in g.fields}
    assert len(form) > 50
    assert fill(source, form, None).config == source


def test_every_control_writes_what_it_reads() -> None:
    from stages.config import RPRConfig, RSRConfig

    for model, path, value, text in (
        (RPRConfig, "actor_lr", 5e-7, "5e-7"),
        (RPRConfig, "keep_steps", (3, 5), "3, 5"),
        (RPRConfig, "draw.stratum_weights", {"easy": 1.5, "hard": 2}, "easy = 1.5, hard = 2"),
        (RPRConfig, "draw.n_tasks", None, ""),
        (RSRConfig, "replay.only_faithful", True, "true"),
    ):
        assert written(value) == text
        kind = kind_of(model, path)
        name = path.split(".")[0]
        given = {name: read(kind, text)} if "." not in path else {name: {path.split(".")[1]: read(kind, text)}}
        found = getattr(model.model_validate(given), name)
        for part in path.split(".")[1:]:
            found = getattr(found, part)
        assert found == value


# --------------------------------------------------------------------------------------------------------------- page


def test_the_form_shows_defaults_an_estimate_and_no_difference(lead: SignedIn) -> None:
    page = lead.get("/cycles/new?recipe=demo").text
    assert re.search(r'name="rpr.0.actor_lr" value="0.0002"', page)
    assert re.search(r"spec §2.3: <code>5e-7</code>", page)
    assert "None: it would repeat recipe demo exactly" in page
    assert re.search(r'Wall time</th><td class="num">[^<]* – ', page)
    assert page.count("<details") >= 8
    assert lead.get("/cycles/new?recipe=../../etc/passwd").status_code == 404
    assert lead.get("/cycles/new?from=99999").status_code == 404


@pytest.mark.usefixtures("nothing_new")
def test_only_a_lead_sees_and_sends_it(store: Store) -> None:
    for role in (m.Role.REVIEWER, m.Role.ANALYST, m.Role.ADMIN):
        with client_as(store, role) as client:
            assert client.get("/cycles/new").status_code == 404
            for address in ("/cycles/new", "/cycles/new/check"):
                assert client.post(address, data={"csrf": client.csrf, "recipe": "smoke"}).status_code == 403


@pytest.mark.usefixtures("nothing_new")
def test_every_wrong_field_has_its_error_and_nothing_is_created(lead: SignedIn) -> None:
    form = sent(lead.get("/cycles/new?recipe=smoke").text)
    wrong = {
        "seed": "many",
        "rounds": "99",
        "rsr.0.explore.attempts_per_task": "0",
        "rsr.0.explore.draw.stratum_weights": "easy",
        "rpr.0.keep_steps": "1, two",
        "rpr.1.actor_lr": "-1",
        "name": "",
        "base": "12345/RPR-9",
        "set": "nonsense\nlearner.colour = 3",
    }
    answer = lead.post("/cycles/new", data=form | wrong)
    assert answer.status_code == 422
    for name, value in wrong.items():
        control = re.search(rf'<(?:input|textarea|select) id="f-{re.escape(name)}".*?</div>', answer.text, re.S)
        assert control is not None, name
        assert 'aria-invalid="true"' in control.group(), name
        assert "⚠" in control.group(), name
        assert markup.escape(value) in control.group(), name  # what was typed stays
    assert "9 fields cannot be used; nothing was created" in answer.text


@pytest.mark.usefixtures("nothing_new")
@pytest.mark.parametrize(
    ("changes", "control", "words"),
    [
        ({"rpr.0.over_sampling_batch_size": "2"}, "rpr.0.over_sampling_batch_size", "at least global_batch_size"),
        (
            {"set": 'learner.backend = "megatron"\nlearner.layout.tensor_model_parallel_size = 8'},
            "set",
            "cannot be divided by 8",
        ),
        ({"base": "{home}/none"}, "base", "no such folder"),
        ({"base": "/etc"}, "base", "outside of the folders that may be named here"),
        ({"base": "{home}/../../etc"}, "base", "outside"),
        ({"pool": "/etc", "validation_suite": "/etc"}, "pool", "outside"),
        ({"reported_suites": "embedded:heldout-names, /root"}, "reported_suites", "outside"),
        ({"rsr.0.rewrite.planner": "~"}, "rsr.0.rewrite.planner", "outside"),
        ({"set": 'rsr.0.review.model = "/etc"'}, "set", "outside"),
        ({"set": 'model = "/etc"'}, "base", "outside"),
        ({"base": "999999"}, "base", "999999"),
        ({"sampler.backend": "sglang"}, "sampler.backend", "RSI_SGLANG_URLS is ''"),
        ({"sampler.backend": "vllm"}, "sampler.backend", "'embedded' or 'sglang'"),
        ({"pool": "/no/such/pool"}, "pool", "name your own validation_suite"),
        ({"pool": "/no/pool", "validation_suite": "/no/suite"}, "pool", "/no/pool"),
        ({"set": "rpr.7.joint_steps = 1"}, "set", "not an index"),
        ({"set": "seed.deep = 1"}, "set", "below a single value"),
    ],
)
def test_what_cannot_run_is_refused_beside_its_field(
    lead: SignedIn, changes: dict[str, str], control: str, words: str
) -> None:
    form = sent(lead.get("/cycles/new?recipe=smoke").text)
    home = str(lead.app.state.settings.home)  # type: ignore[attr-defined]
    answer = lead.post("/cycles/new", data=form | {k: v.replace("{home}", home) for k, v in changes.items()})
    assert answer.status_code == 422
    found = re.search(rf'id="h-{re.escape(control)}">(.*?)</div>', answer.text, re.S)
    assert found is not None
    assert words in markup.unescape(found.group(1))


@pytest.mark.usefixtures("nothing_new")
def test_check_says_what_it_would_cost_and_creates_nothing(lead: SignedIn) -> None:
    form = sent(lead.get("/cycles/new?recipe=smoke").text)
    changed = form | {"rounds": "1", "set": "rsr.*.replay.attempts_per_runbook = 3"}
    page = lead.post("/cycles/new/check", data=changed)
    assert page.status_code == 200
    rows = re.findall(r'<th scope="row" class="mono">([^<]*)</th>', page.text)
    assert set(rows) == {"rounds", "rsr.0.replay.attempts_per_runbook"}
    part = lead.post(
        "/cycles/new/check", data=form | {"seed": "x"}, headers={"HX-Request": "true", "HX-Target": "aside#plan"}
    )
    assert part.text.lstrip().startswith('<aside id="plan"')
    assert "No estimate while 1 field cannot be used" in part.text


@pytest.mark.usefixtures("nothing_new")
def test_it_needs_the_token_of_its_sign_in(lead: SignedIn) -> None:
    form = sent(lead.get("/cycles/new?recipe=smoke").text)
    assert lead.post("/cycles/new", data=form | {"csrf": "forged"}).status_code == 403


# ------------------------------------------------------------------------------------------------------------- launch


def test_launch_clone_and_start_from_a_checkpoint(
    store: Store, lead: SignedIn, submitted: list[int], tmp_path: Path
) -> None:
    form = sent(lead.get("/cycles/new?recipe=smoke").text)
    form |= {"name": "first <b>try</b>", "seed": "7", "rsr.0.review.policy": "human"}
    answer = lead.post("/cycles/new", data=form, follow_redirects=False)
    assert answer.status_code == 303
    first = cycles(store)[0]
    assert answer.headers["Location"] == f"/cycles/{first}"
    row = store.cycles.get(first)
    assert (row.created_by, row.seed, row.config["rsr"][0]["review"]["policy"]) == ("ada", 7, "human")
    assert submitted == [first]
    audit = store.audit_trail.list(object_kind="cycle", object_id=first).items
    assert [(a.actor, a.action) for a in audit] == [("ada", "cycle.launch")]
    assert [s.name for s in store.stages.of_cycle(first)] == ["Base", "RSR-1", "RPR-1", "RSR-2", "RPR-2"]

    # A clone starts from what the first one ran with, not from the recipe.
    page = lead.get(f"/cycles/new?from={first}").text
    assert 'value="first &lt;b&gt;try&lt;/b&gt;"' in page
    assert f"it would repeat cycle {first} exactly" in page
    checkpoint = factories_checkpoint(store, first, shipped_model())
    clone = sent(page) | {"name": "second", "seed": "8", "base": f"{first}/RPR-1"}
    assert clone["from"] == str(first)
    shown = lead.post("/cycles/new/check", data=clone).text
    assert set(re.findall(r'<th scope="row" class="mono">([^<]*)</th>', shown)) == {"name", "seed", "model"}
    assert lead.post("/cycles/new", data=clone, follow_redirects=False).status_code == 303
    second = store.cycles.get(cycles(store)[0])
    assert (second.cloned_from_id, second.seed) == (first, 8)
    assert second.config["rsr"][0]["review"]["policy"] == "human"
    assert second.base_checkpoint == str(Path(checkpoint.path) / "actor")
    clone_page = lead.get(f"/cycles/{second.id}").text
    assert f"cycle {first}" in clone_page


def factories_checkpoint(store: Store, cycle_id: int, model: Path) -> m.Checkpoint:
    """A stored checkpoint whose actor is a real model."""
    folder = Path(store.artifacts.url).parent / "RPR-1"
    folder.mkdir()
    (folder / "actor").symlink_to(model)
    row = m.Checkpoint(cycle_id=cycle_id, name="RPR-1", path=str(folder), actor_digest="a" * 64, retained=True)
    return store.checkpoints.save(row)


def test_sampling_on_servers_is_a_field_that_counts_once_they_are_named(store: Store, submitted: list[int]) -> None:
    def form_of(servers: str, path: str = "") -> tuple[SignedIn, dict[str, str]]:
        app = app_for(store, sglang_urls=servers, sglang_weights_path=path)
        with client_as(app, m.Role.LEAD, login="ada") as client:
            page = client.get("/cycles/new?recipe=smoke").text
            assert "the servers of RSI_SGLANG_URLS" in page
            return client, sent(page)

    client, form = form_of("http://gpu-1:30000, http://gpu-2:30000")
    assert form["sampler.backend"] == "embedded"
    answer = client.post("/cycles/new", data=form | {"sampler.backend": "sglang"}, follow_redirects=False)
    assert answer.status_code == 303
    row = store.cycles.get(cycles(store)[0])
    assert submitted == [row.id]
    assert row.config["sampler"]["backend"] == "sglang"
    assert "SGLang servers" in row.digest_claim_void
    client, form = form_of("http://gpu-1:30000", path="/mnt/weights")
    answer = client.post("/cycles/new", data=form | {"sampler.backend": "sglang"})
    assert answer.status_code == 422
    assert "RSI_SGLANG_WEIGHTS_URL is empty" in markup.unescape(answer.text)
    assert cycles(store)[0] == row.id


def test_a_cycle_that_no_server_takes_is_shown_as_what_it_is(
    store: Store, lead: SignedIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise ServiceError("No Prefect server answers")

    monkeypatch.setattr(workers, "submit_cycle", refuse)
    before = len(cycles(store))
    form = sent(lead.get("/cycles/new?recipe=smoke").text)
    answer = lead.post("/cycles/new", data=form)
    assert len(cycles(store)) == before + 1
    assert "It could not be started: No Prefect server answers" in answer.text
    assert str(answer.url).endswith(f"/cycles/{cycles(store)[0]}")


def test_costs_come_from_a_measured_cycle(store: Store, lead: SignedIn) -> None:
    from orchestrator.costs import predict
    from orchestrator.persist import persist_many
    from stages.domain import Phase
    from stages.records import AttemptFinished

    config = load_recipe("smoke")
    measured = create_cycle(store, config, actor="ada")
    (stage, *_) = store.stages.of_cycle(measured.id or 0)
    attempts = [
        AttemptFinished(phase=Phase.EXPLORE, trajectory=factories.trajectory(900 + i, tokens=100 + 10 * i))
        for i in range(8)
    ]
    persist_many(store, stage, attempts)
    predicted = predict(store, config, like=measured.id)
    sampled = sorted(a.trajectory.sampled_tokens for a in attempts)
    assert predicted.like == measured.id
    assert predicted.tokens is not None
    low, high = (t / predicted.attempts for t in predicted.tokens)
    assert sampled[0] <= low < high <= sampled[-1]
    assert predicted.sandbox_s == (0.5 * predicted.attempts,) * 2
    assert f"attempts of cycle {measured.id}" in lead.get(f"/cycles/new?from={measured.id}").text
