"""Adapter files that nobody has reviewed: expressions, files that are none, and names."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lorakernels.adapters import expressions
from lorakernels.adapters.errors import AdapterError, printable
from lorakernels.adapters.expressions import (
    MAX_LENGTH,
    Expression,
    ExpressionError,
    check_expression,
    limited_matching,
)
from lorakernels.adapters.files import read_small_file
from lorakernels.adapters.peft_folder import read_peft_folder
from lorakernels.adapters.peft_targets import layer_expression, module_expression

Q = "model.layers.0.self_attn.q_proj"
# takes time that doubles with each letter, and no engine sees through it
SLOW = "(?:a|aa)+"
SLOW_NAME = "a" * 90 + "!"

ROOT = Path(__file__).parents[2]
# what a server does with a folder from somewhere else
READER = """
import sys
from lorakernels.adapters.errors import AdapterError
from lorakernels.adapters.peft_folder import read_peft_folder
try:
    adapter = read_peft_folder(sys.argv[1])
except AdapterError as error:
    print(error)
    sys.exit(1)
print("read", *sorted(adapter.modules))
"""
REFUSED = 1


def write(folder: Path, module: str = Q, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    tensors = {
        f"base_model.model.{module}.lora_A.weight": torch.ones(4, 8),
        f"base_model.model.{module}.lora_B.weight": torch.ones(8, 4),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(AdapterError) as raised:
        read_peft_folder(folder)
    return str(raised.value)


def read_in_a_process(folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", READER, str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


EXPRESSIONS = [
    "q_proj",
    r".*\.(q|up)_proj",
    r"model\.layers\.(?!0\.)\d+\..*",
    r".*(?<!my_)q_proj",
    r"^model.*_proj$",
    r"(?i)MODEL\..*\.Q_PROJ",
    r".*\.(?P<part>q|k)_proj",
    r"model\.layers\.[0-3]{1,2}\.self_attn\.[a-z]_proj",
    r".*layers\.1{2}\..*",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)",
    r"\bmodel\b.*\Z",
    r"(?s).+_proj",
    r"(?x) .* q_proj  # of attention",
    r".*\.(a)?(?(1)x|q_proj)",
    r"model[.]layers[.]\w+[.].*",
    r".*[^k]_proj|lm_head",
    r"(?>.*\.)q_proj",
    r"\w{,5}_proj",
    r"",
]
NAMES = [
    *(f"model.layers.{n}.self_attn.{p}_proj" for n in (0, 1, 11) for p in ("q", "k", "my_q")),
    *(
        "model.language.mlp.up_proj",
        "lm_head",
        "q_proj",
        "Model.Q_PROJ",
        "a\nq_proj",
        "größe.q_proj",
    ),
]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_an_expression_matches_what_re_matches(text: str) -> None:
    check_expression(text)
    for name in NAMES:
        found = Expression(text, text, "file: field").fullmatch(name)
        assert (found is not None) == (re.fullmatch(text, name) is not None), name
    for build in (module_expression, layer_expression):
        used_as = build(text)
        try:
            re.compile(used_as)
        except re.error:
            continue
        for name in NAMES:
            found = Expression(text, used_as, "file: field").match(name)
            expected = re.match(used_as, name)
            assert (found and found.span()) == (expected and expected.span()), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a" * (MAX_LENGTH + 1), "of at most 4096 characters, not 4097"),
        ("(q_proj", "missing ), unterminated subpattern"),
        ("(?:" * 1000 + ")" * 1000, "maximum recursion depth exceeded"),
        # `regex` would take these as fuzzy matching and as a class, `re` does not
        ("(?:q_proj){e<=2}", r"with { written as \{"),
        ("[[:alpha:]]+", r"with [: written as \[:"),
        # an escaped backslash escapes nothing
        (r"\\{e<=2}", r"with { written as \{"),
        (r"\pL+", r"bad escape \p"),
        ("q_proj(?i)", "global flags not at the start"),
    ],
)
def test_what_re_and_regex_do_not_agree_on_is_no_expression(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=re.escape(message)):
        check_expression(text)


@pytest.mark.parametrize(
    ("text", "name"), [(r"q\{e\}", "q{e}"), (r"\{x", "{x"), (r"\[:a", "[:a"), (r"[\[]:", "[:")]
)
def test_an_escaped_brace_or_bracket_stands_for_itself(text: str, name: str) -> None:
    check_expression(text)
    assert Expression(text, text, "").fullmatch(name)


@pytest.mark.parametrize("text", [r"q\{e\}", r"[{]", "a{2}", "a{,2}", "a{2,}"])
def test_braces_that_mean_the_same_to_both_are_allowed_or_refused_but_never_differ(
    text: str,
) -> None:
    try:
        check_expression(text)
    except ExpressionError:
        return
    for name in ("q{e}", "{", "aa", "a", ""):
        found = Expression(text, text, "").fullmatch(name)
        assert (found is not None) == (re.fullmatch(text, name) is not None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_modules", SLOW),
        ("exclude_modules", SLOW),
        ("rank_pattern", {SLOW: 4}),
        ("alpha_pattern", {SLOW: 4}),
        ("layers_pattern", [SLOW]),
    ],
)
def test_an_expression_that_takes_long_is_refused_in_every_field(
    tmp_path: Path, field: str, value: object
) -> None:
    chosen = {"layers_to_transform": [0], "target_modules": ["a!"]}
    fields = chosen if field == "layers_pattern" else {"target_modules": [SLOW_NAME]}
    module = f"{SLOW_NAME[:-1]}.x.a!" if field == "layers_pattern" else SLOW_NAME
    message = refusal(write(tmp_path / "adapter", module, **{**fields, field: value}))
    assert message.startswith(f"{tmp_path / 'adapter' / 'adapter_config.json'}: {field}: the expr")
    assert f"'{SLOW}' takes more than 1 s to match aaa" in message
    assert "allowed is one that matches names of modules at once" in message


def test_slow_matches_of_one_adapter_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    class Slow:
        def match(self, name: str, timeout: float) -> None:
            given.append(timeout)

    clock = iter(range(100))
    monkeypatch.setattr("lorakernels.adapters.expressions._compiled", lambda text: Slow())
    monkeypatch.setattr("time.perf_counter", lambda: next(clock) / 4)
    expression = Expression("a", "a", "file: field")
    with limited_matching():
        for _ in range(6):
            expression.match("a")
    assert given == [1.0, 0.75, 0.5, 0.25, 0.001, 0.001]
    # the next adapter is not to blame
    with limited_matching():
        expression.match("a")
    assert given[-1] == 1.0


@pytest.mark.drill(
    tried="An adapter with an expression that would be matched for years",
    exit_code=REFUSED,
    kept="the process; one line names the file, the field and the expression",
)
def test_a_hostile_expression_does_not_hang_a_server(drill, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = read_in_a_process(write(tmp_path / "a", SLOW_NAME, target_modules=f"({SLOW})+$"))
    drill(done.returncode, done.stdout)
    assert len(done.stdout.splitlines()) == 1
    assert f"adapter_config.json: target_modules: the expression '({SLOW})+$' takes" in done.stdout


def test_nested_repetitions_that_match_at_once_are_only_expressions(tmp_path: Path) -> None:
    module = "a" * 60
    adapter = read_peft_folder(write(tmp_path / "adapter", module, target_modules="(a+)+$"))
    assert adapter.modules.keys() == {module}
    message = refusal(write(tmp_path / "adapter", f"{module}!", target_modules="(a+)+$"))
    assert message.endswith("target_modules of adapter_config.json does not name it")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    # a longer path than a socket may have would not fit
    folder = os.open(path.parent, os.O_RDONLY)
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"/proc/self/fd/{folder}/{path.name}")
    server.close()
    os.close(folder)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


NO_FILES = [
    (_pipe, "must be a regular file (got a pipe)"),
    (_device, "must be a regular file (got a device)"),
    (_socket, "must be a regular file (got a socket)"),
    (Path.mkdir, "must be a regular file (got a folder)"),
]


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize(("make", "message"), NO_FILES, ids=["pipe", "device", "socket", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, name: str, make: Any, message: str
) -> None:
    path = write(tmp_path / "adapter") / name
    path.unlink()
    make(path)
    assert refusal(path.parent) == f"{path}: {message}"


def test_a_file_that_became_a_pipe_after_the_first_look_is_refused_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "adapter_config.json"
    os.mkfifo(path)
    monkeypatch.setattr("lorakernels.adapters.files.require_regular", lambda path: None)
    with pytest.raises(AdapterError, match=r"must be a regular file \(got a pipe\)$"):
        read_small_file(path)


def test_a_link_to_a_file_is_a_file(tmp_path: Path) -> None:
    write(tmp_path / "stored")
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (linked / name).symlink_to(tmp_path / "stored" / name)
    assert read_peft_folder(linked).modules.keys() == {Q}


def test_a_config_of_many_megabytes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "adapter") / "adapter_config.json"
    _sparse(path)
    assert refusal(path.parent) == f"{path}: must have at most 16 MiB (got {1 << 40} bytes)"


@pytest.mark.drill(
    tried="A pipe, a device and an endless file in place of an adapter's files",
    exit_code=REFUSED,
    kept="the process; one line for each says what is allowed",
)
def test_files_that_never_end_do_not_hang_a_server(drill, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folders = []
    for number, (name, make) in enumerate(
        [
            ("adapter_config.json", _pipe),
            ("adapter_config.json", _sparse),
            ("adapter_model.safetensors", _device),
        ]
    ):
        folders.append(write(tmp_path / str(number)))
        (folders[-1] / name).unlink()
        make(folders[-1] / name)
    for folder in folders:
        done = read_in_a_process(folder)
        drill(done.returncode, done.stdout)
        assert len(done.stdout.splitlines()) == 1
        assert "must " in done.stdout


HOSTILE = "model.\x1b[2J\x1b[31mq\u202e_proj\nINFO all cases passed\x00"
SHOWN = r"model.\x1b[2J\x1b[31mq\u202e_proj\nINFO all cases passed\x00"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (HOSTILE, SHOWN),
        ("größe_投影", "größe_投影"),
        ("\udcff", r"\udcff"),
        ("\u2028\u00a0\u200b\u2066", r"\u2028\xa0\u200b\u2066"),
        ("x" * 160, "x" * 160),
        ("x" * 1000, "x" * 80 + "... 840 more characters ..." + "x" * 80),
    ],
)
def test_a_name_is_shown_on_one_line_without_what_a_terminal_obeys(name: str, shown: str) -> None:
    assert printable(name) == shown
    assert str(AdapterError(name)) == (shown if len(name) < 1000 else name)


@pytest.mark.parametrize(
    "change",
    [
        {"module": HOSTILE},
        {"module": "x" * 10_000},
        {"target_modules": [HOSTILE]},
        {"target_modules": "(" + "x" * 3000},
        {HOSTILE: 1},
        {"x" * 100_000: "y" * 100_000},
        {"bias": HOSTILE * 1000},
        {"rank_pattern": {HOSTILE: "y" * 100_000}},
        {"rank_pattern": {"[" + HOSTILE: 1}},
    ],
)
def test_no_refusal_repeats_what_a_file_says_at_length_or_unescaped(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    message = refusal(write(tmp_path / "adapter", **change))
    assert message.isprintable()
    assert len(message) < 1000


@pytest.mark.drill(
    tried="An adapter whose names hold terminal sequences, line breaks and bidi controls",
    exit_code=REFUSED,
    kept="the terminal and the log; one line with the names escaped",
)
def test_a_terminal_obeys_no_name_of_an_adapter(drill, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = read_in_a_process(write(tmp_path / "a\x1b[2Jb", HOSTILE))
    drill(done.returncode, done.stdout)
    assert done.stdout.removesuffix("\n").isprintable()
    assert SHOWN in done.stdout


def test_many_matches_that_are_no_slow_ones_have_a_limit_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expressions, "_Budget", partial(expressions._Budget, total=0.0))
    one = Expression("q_proj", "q_proj", "config.json: target_modules")
    with limited_matching(), pytest.raises(AdapterError, match="and the others of this adapter"):
        one.fullmatch("q_proj")


def test_a_field_of_more_patterns_than_modules_are_named_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "many", rank_pattern={f"m{number}": 4 for number in range(4097)})
    with pytest.raises(AdapterError, match="rank_pattern must be at most 4096 patterns"):
        read_peft_folder(folder)
