"""Reading and writing task folders: what is well formed loads as written; each kind of damage is named, with its file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from stages.domain import CheckRole, Stratum
from stages.errors import TaskError
from stages.tasks.digests import folder_digest
from stages.tasks.generate import generate_pool
from stages.tasks.harbor import load_suite, load_task
from stages.tasks.write import MANIFEST, write_pool

PLAIN = {
    "instruction.md": "Do it.\n",
    "task.toml": '[metadata]\ndifficulty = "hard"\ncategory = "demo"\n[environment]\ndocker_image = "debian:12-slim"\n',
    "tests/test.sh": "exit 0\n",
}


def folder_of(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pools") / "small"
    write_pool(generate_pool("train", 16, 0), folder, kind="train", seed=0)
    return folder


def test_what_is_written_is_what_is_read(pool: Path):
    specs = {spec.id: spec for spec in generate_pool("train", 16, 0)}
    suite = load_suite(pool, strict=True)
    assert suite.warnings == suite.broken == ()
    assert {task.id for task in suite.tasks} == set(specs)
    assert suite.kind == "train"
    for task in suite.tasks:
        spec = specs[task.id]
        assert task.instruction == spec.instruction
        assert task.files == {path: text.encode() for path, text in spec.files.items()}
        assert task.checks == spec.manifest
        assert task.checks[-1].role is CheckRole.GATE
        assert (task.family, task.stratum, task.max_turns) == (spec.family, spec.stratum, spec.max_turns)
        assert (task.workdir, task.suite, task.nop_progress) == ("/app", "small", 0)
        assert task.digest == folder_digest(task.root)
        assert suite.by_id[task.id] is task


def test_modes_do_not_depend_on_the_umask(tmp_path: Path):
    old = os.umask(0o077)
    try:
        write_pool(generate_pool("train", 2, 0), tmp_path / "p")
    finally:
        os.umask(old)
    for path in (tmp_path / "p").rglob("*"):
        if path.is_file() and "environment" in path.parts:
            assert path.stat().st_mode & 0o777 == 0o644


def test_digest_follows_content_only(pool: Path, tmp_path: Path):
    task = next(p for p in sorted(pool.iterdir()) if p.is_dir())
    copy = shutil.copytree(task, tmp_path / "copy")
    assert folder_digest(copy) == folder_digest(task)
    (copy / "tests/test.sh").chmod(0o600)
    assert folder_digest(copy) == folder_digest(task)
    with (copy / "instruction.md").open("a") as handle:
        handle.write(" ")
    assert folder_digest(copy) != folder_digest(task)


def test_a_changed_suite_is_refused_until_its_digest_is_dropped(pool: Path, tmp_path: Path):
    copy = shutil.copytree(pool, tmp_path / "copy")
    victim = next(p for p in sorted(copy.iterdir()) if p.is_dir())
    (victim / "instruction.md").write_text("something else\n")
    with pytest.raises(TaskError, match=r"suite\.toml: digest .* does not match"):
        load_suite(copy)
    manifest = copy / MANIFEST
    manifest.write_text("".join(r for r in manifest.read_text().splitlines(True) if not r.startswith("digest")))
    assert load_suite(copy).digest != load_suite(pool).digest


def test_a_manifest_names_task_folders_in_any_place(pool: Path, tmp_path: Path):
    whole = load_suite(pool)
    chosen = [t.root.name for t in whole.tasks[:2]]
    manifest = tmp_path / "mine.toml"
    listed = ", ".join(f'"{pool / name}"' for name in reversed(chosen))
    manifest.write_text(f'version = "3"\nfolders = [{listed}]\n')
    suite = load_suite(manifest)
    assert (suite.name, suite.version, sorted(t.root.name for t in suite.tasks)) == ("mine", "3", sorted(chosen))
    assert load_suite(pool / MANIFEST).digest == whole.digest
    manifest.write_text(f'digest = "{suite.digest}"\nfolders = [{listed}]\n')
    assert load_suite(manifest).digest == suite.digest  # of its tasks, in whatever order
    for text, words in (
        (f'digest = "{"0" * 64}"\nfolders = [{listed}]\n', "does not match the tasks"),
        (f"folders = [{listed}, {listed}]\n", "occur twice"),
        ('folders = ["gone"]\n', "gone"),
        ("folders = 3\n", "must be a list"),
        ("folders = []\n", "holds no task folder"),
    ):
        manifest.write_text(text)
        with pytest.raises(TaskError, match=words):
            load_suite(manifest)
    with pytest.raises(TaskError, match="no such manifest"):
        load_suite(tmp_path / "other.toml")


def test_write_pool_is_whole_or_absent(pool: Path, tmp_path: Path):
    with pytest.raises(TaskError, match="exists already"):
        write_pool(generate_pool("train", 2, 0), pool)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(TaskError, match="cannot be written"):
        write_pool(generate_pool("train", 2, 0), blocked / "pool")
    assert not list(tmp_path.glob("tmp_pool_*"))


def test_plain_harbor_folder(tmp_path: Path):
    task = load_task(folder_of(tmp_path / "t", PLAIN), "s")
    assert (task.id, task.family, task.stratum, task.workdir) == ("t", "demo", Stratum.HARD, "/app")
    assert task.instruction == "Do it."
    assert task.checks == ()
    assert task.max_turns == 100_000
    assert task.verifier_timeout_s == 600.0


def test_legacy_keys_and_canary(tmp_path: Path):
    files = PLAIN | {
        "instruction.md": "<!-- some canary 1234 -->\n\nDo it.\n",
        "task.toml": (
            'version = "1.0"\n[environment]\nallow_internet = false\nmemory = "2G"\nstorage = "512M"\n'
            'docker_image = "x:1"\n'
        ),
    }
    task = load_task(folder_of(tmp_path / "t", files), "s", strict=True)
    assert task.instruction == "Do it."
    assert (task.limits.memory_mb, task.limits.storage_mb) == (2048, 512)


def test_own_table(tmp_path: Path):
    toml = (
        PLAIN["task.toml"]
        + "cpus = 2\nmemory_mb = 100\n[metadata.terminal_rsi]\nfamily='f'\nstratum='easy'\nmax_turns=3\nnop_progress=1\n"
        "checks=['a', {id='b', role='gate'}]\n[metadata.terminal_rsi.limits]\npids=9\ncommand_timeout_s=1.5\n"
    )
    task = load_task(folder_of(tmp_path / "t", PLAIN | {"task.toml": toml}), "s", strict=True)
    assert (task.family, task.stratum, task.max_turns, task.nop_progress) == ("f", Stratum.EASY, 3, 1)
    assert [(c.id, c.role) for c in task.checks] == [("a", CheckRole.SCENARIO), ("b", CheckRole.GATE)]
    limits = task.limits
    assert (limits.cpus, limits.memory_mb, limits.pids, limits.command_timeout_s) == (2.0, 100, 9, 1.5)


BROKEN = {
    "no instruction": ({"instruction.md": None}, r"t/instruction\.md: missing"),
    "empty instruction": ({"instruction.md": " \n"}, r"t/instruction\.md: empty"),
    "no toml": ({"task.toml": None}, r"t/task\.toml: missing"),
    "no verifier": ({"tests/test.sh": None}, r"t/tests/test\.sh: missing"),
    "no environment": ({"task.toml": "[environment]\n"}, r"environment/Dockerfile: missing"),
    "not toml": ({"task.toml": "[metadata\nx = 1\n"}, r"t/task\.toml:1: not valid TOML: .*line 1"),
    "unfinished toml": ({"task.toml": "[metadata]\nx = [1,\n"}, r"t/task\.toml:3: not valid TOML"),
    "deep toml": ({"task.toml": "x = " + "[" * 20_000}, r"t/task\.toml: lists or tables nested too deep"),
    "deep folder": ({"tests/" + "d/" * 40 + "x": ""}, r"t/tests/d/d/.*: more than 32 folders deep"),
    "text for a number": ({"task.toml": "[agent]\n\ntimeout_sec = '5'\n"}, r"task\.toml:3: agent\.timeout_sec"),
    "negative limit": ({"task.toml": "[environment]\nmemory_mb = -1\n"}, r"task\.toml:2: environment\.memory_mb"),
    "bad stratum": (
        {"task.toml": "[metadata.terminal_rsi]\nfamily = 'x'\nstratum = 'tough'\n"},
        r"task\.toml:3: metadata\.terminal_rsi\.stratum",
    ),
    "check twice": (
        {"task.toml": PLAIN["task.toml"] + "[metadata.terminal_rsi]\nchecks = ['a', 'a']\n"},
        r"task\.toml:7: check id 'a' occurs twice",
    ),
    "nan": ({"task.toml": "[verifier]\ntimeout_sec = nan\n"}, r"task\.toml:2: verifier\.timeout_sec"),
    "legacy size": ({"task.toml": "[environment]\nmemory = 'lots'\n"}, r"task\.toml:1: environment"),
    "endless size": (
        {"task.toml": f"[environment]\nmemory = '{'9' * 5000}G'\n"},
        r"task\.toml:1: environment: .*16 TB",
    ),
    "endless number": ({"task.toml": f"[agent]\ntimeout_sec = {'9' * 5000}\n"}, r"t/task\.toml: .*digits"),
    "endless memory": (
        {"task.toml": "[environment]\nmemory_mb = 99999999999\n"},
        r"task\.toml:2: environment\.memory_mb",
    ),
    "no processor": ({"task.toml": "[environment]\ncpus = 1e-9\n"}, r"task\.toml:2: environment\.cpus"),
    "no room for a shell": (
        {"task.toml": "[metadata.terminal_rsi.limits]\npids = 1\n"},
        r"task\.toml:2: metadata\.terminal_rsi\.limits\.pids",
    ),
    "endless variable": (
        {"task.toml": PLAIN["task.toml"] + f"[environment.env]\nA = '{'x' * 200_000}'\n"},
        r"task\.toml:\d+: environment\.env\.A: no environment variable can",
    ),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_damage_is_named_with_file_and_line(damage: str, tmp_path: Path):
    changes, message = BROKEN[damage]
    files = {k: v for k, v in (PLAIN | changes).items() if v is not None}
    with pytest.raises(TaskError, match=message):
        load_task(folder_of(tmp_path / "t", files), "s")


def test_a_dockerfile_of_continued_lines_is_read_in_one_go(tmp_path: Path):
    """Joined one by one, a megabyte of them took minutes."""
    docker = "FROM debian:12\nENV A=1 " + "\\\n" * 300_000 + " B=2\nWORKDIR /here\n"
    task = load_task(folder_of(tmp_path / "t", PLAIN | {"environment/Dockerfile": docker}), "s")
    assert task.workdir == "/here"
    assert dict(task.env) == {"A": "1", "B": "2"}


def test_unknown_keys_warn_or_are_refused(tmp_path: Path):
    toml = (
        PLAIN["task.toml"] + "memroy_mb = 5\n[agent]\n# comment\nspeed = 2\n[metadata.terminal_rsi]\nstratu = 'easy'\n"
    )
    folder = folder_of(tmp_path / "t", PLAIN | {"task.toml": toml})
    warnings: list[str] = []
    load_task(folder, "s", warnings=warnings)
    assert [w.partition("task.toml:")[2] for w in warnings] == [
        "9: unknown key agent.speed",
        "6: unknown key environment.memroy_mb",
        "11: unknown key metadata.terminal_rsi.stratu",
    ]
    with pytest.raises(TaskError, match="unknown key"):
        load_task(folder, "s", strict=True)


def test_not_utf8(tmp_path: Path):
    folder = folder_of(tmp_path / "t", PLAIN)
    (folder / "instruction.md").write_bytes(b"good\nb\xff\n")
    with pytest.raises(TaskError, match=r"instruction\.md:2: not UTF-8"):
        load_task(folder, "s")


def test_links_and_special_files(tmp_path: Path):
    folder = folder_of(tmp_path / "t", PLAIN)
    (folder / "alias.md").symlink_to("instruction.md")
    load_task(folder, "s")
    for make, message in (
        (lambda p: p.symlink_to("/etc/hostname"), "symbolic link out of the task folder"),
        (lambda p: p.symlink_to("../../elsewhere"), "symbolic link out of the task folder"),
        (lambda p: p.symlink_to("tests"), "not a regular file"),
        (lambda p: os.mkfifo(p), "not a regular file"),
        (lambda p: p.symlink_to("nowhere"), "cannot be read"),
    ):
        bad = folder / "bad"
        make(bad)
        with pytest.raises(TaskError, match=f"t/bad: {message}"):
            load_task(folder, "s")
        bad.unlink()


def test_too_large(tmp_path: Path):
    folder = folder_of(tmp_path / "t", PLAIN)
    with (folder / "big").open("wb") as handle:
        handle.truncate(17 << 20)
    with pytest.raises(TaskError, match=r"t/big: \d+ bytes"):
        load_task(folder, "s")
    (folder / "big").unlink()
    for i in range(5):
        with (folder / f"big{i}").open("wb") as handle:
            handle.truncate(15 << 20)
    with pytest.raises(TaskError, match="more than 64 MiB"):
        load_task(folder, "s")


def test_suite_names_every_broken_task_and_can_go_on(tmp_path: Path):
    folder_of(tmp_path / "s/good", PLAIN)
    folder_of(tmp_path / "s/bad1", {"instruction.md": "x"})
    folder_of(tmp_path / "s/bad2", PLAIN | {"task.toml": "x ="})
    with pytest.raises(TaskError) as caught:
        load_suite(tmp_path / "s")
    assert "bad1/task.toml" in str(caught.value)
    assert "bad2/task.toml" in str(caught.value)
    suite = load_suite(tmp_path / "s", skip_broken=True)
    assert [t.id for t in suite.tasks] == ["good"]
    assert len(suite.broken) == 2
    with pytest.raises(TaskError, match="no such suite"):
        load_suite(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match="holds no task folder"):
        load_suite(tmp_path / "empty")


def test_seven_hundred_tasks_are_written_and_read(tmp_path: Path):
    specs = generate_pool("train", 700, 0)
    write_pool(specs, tmp_path / "p")
    suite = load_suite(tmp_path / "p", strict=True)
    assert sorted(t.id for t in suite.tasks) == sorted(s.id for s in specs)
    assert len({t.digest for t in suite.tasks}) == 700
