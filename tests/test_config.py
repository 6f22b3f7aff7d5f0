"""The command line and the configuration: what is accepted, what is refused, and how fast."""
import copy
import json
import math
import os
import re
import subprocess
import sys
import time
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st

import train_zero2
from conftest import ROOT, SCRIPT, STAGE0, ZERO2, launch
from train_zero2 import CONFIG_KEYS, Refused, check_config, flatten, parse_arguments, plan_runs

GOOD = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-05, "torch_adam": True, "fused": True}},
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 50000000.0,
                          "allgather_bucket_size": 50000000.0}}
ZERO = "zero_optimization"


def changed(path, value):
    """GOOD with the value at a dotted path set; ... takes the key away."""
    config = copy.deepcopy(GOOD)
    *sections, name = path.split(".")
    section = config
    for part in sections:
        section = section.setdefault(part, {})
    if value is ...:
        del section[name]
    else:
        section[name] = value
    return config


def plan(text, tmp_path, *arguments, ranks=1):
    """plan_runs over one config file with this text (or bytes, or dict)."""
    path = tmp_path / "c.json"
    if isinstance(text, dict):
        text = json.dumps(text)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return plan_runs(parse_arguments(["--config", str(path), *arguments]), ranks)


def refusal(call, *arguments, **keywords):
    """The message of the Refused that the call raises: one line."""
    with pytest.raises(Refused) as caught:
        call(*arguments, **keywords)
    message = str(caught.value)
    assert message and len(re.split(r"[\r\n]", message)) == 1
    return message


# ------------------------------------------------------------------ each case of the cases folder

@pytest.mark.parametrize("path, value, words", [
    (f"{ZERO}.reduce_bucket_size", "5e7", [f"{ZERO}.reduce_bucket_size", '5e7, not "5e7"']),
    (f"{ZERO}.reduce_bucket_size", 50000000.5, ["reduce_bucket_size", "whole number"]),
    (f"{ZERO}.reduce_bucket_size", 0, ["reduce_bucket_size", "from 1"]),
    (f"{ZERO}.reduce_bucket_size", -1, ["reduce_bucket_size", "-1", "from 1"]),
    (f"{ZERO}.reduce_bucket_size", "auto", ["reduce_bucket_size", "Hugging Face Trainer"]),
    (f"{ZERO}.allgather_bucket_size", 12345, ["allgather_bucket_size", "even", "12346"]),
    (f"{ZERO}.allgather_batch_size", 5e7, ["allgather_batch_size", "did you mean",
                                           "allgather_bucket_size"]),
    ("zero_optimisation", {"stage": 2}, ["zero_optimisation", "did you mean", ZERO]),
    ("bf16", {"enabled": True}, ["fp16.enabled", "bf16.enabled", "both"]),
    ("optimizer", ..., ["optimizer", "missing", "AdamW"]),
    ("train_micro_batch_size_per_gpu", ..., ["batch size", "train_micro_batch_size_per_gpu"]),
])
def test_refused_with_file_key_and_fix(path, value, words, tmp_path):
    message = refusal(plan, changed(path, value), tmp_path)
    assert all(word in message for word in ["c.json", *words]), message


@pytest.mark.parametrize("text, words", [
    ('{\n  // buckets\n  "zero_optimization": {"stage": 2}\n}', ["line 2", "column 3", "comments"]),
    ('{"zero_optimization": {"stage": 2,}}', ["line 1", "column 35", "trailing comma"]),
    ('{"optimizer": {"type": ', ["line 1", "column 24"]),
    ("", ["line 1", "column 1"]),
    ("[1, 2]", ["object", "list"]),
    ("null", ["object"]),
    ('{"gradient_clipping": NaN}', ["NaN", "finite"]),
    ('{"gradient_clipping": -Infinity}', ["Infinity", "finite"]),
    ('{"gradient_clipping": 1e999}', ["gradient_clipping"]),
    ('{"gradient_clipping": %s}' % ("1" * 5000), ["c.json"]),
    ("[" * 100000, ["c.json"]),
    ('{"fp16": {"enabled": true, "enabled": false}}', ["enabled", "twice"]),
    ('{"gradient_clipping": 1, "gradient_clipping": 1}', ["gradient_clipping", "twice"]),
    ('{"a": "ä"}'.encode("latin-1"), ["UTF-8", "byte 7"]),
    (json.dumps(GOOD).encode("utf-16"), ["UTF-8", "byte 0"]),
    (b"\x00", ["line 1", "column 1"]),
])
def test_unreadable_text_is_refused_with_its_place(text, words, tmp_path):
    message = refusal(plan, text, tmp_path)
    assert all(word in message for word in ["c.json", *words]), message


def test_missing_file_and_folder_are_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        message = refusal(plan_runs, parse_arguments(["--config", str(path)]), 1)
        assert str(path) in message and "cannot be read" in message


@pytest.mark.parametrize("text", [
    json.dumps(GOOD), "\ufeff" + json.dumps(GOOD), json.dumps(GOOD, indent=3).replace("\n", "\r\n"),
    STAGE0.read_text(), ZERO2.read_text()])
def test_good_configs_are_accepted(text, tmp_path):
    [run] = plan(text, tmp_path)
    for path, value in flatten(json.loads(text.lstrip("\ufeff"))).items():
        assert run.config[path] == value


def test_the_two_shipped_configs_differ_in_the_zero_section_alone():
    stage0, zero2 = (json.loads(path.read_text()) for path in (STAGE0, ZERO2))
    assert (stage0.pop(ZERO)["stage"], zero2.pop(ZERO)["stage"]) == (0, 2)
    assert stage0 == zero2
    assert "train_batch_size" not in zero2 and zero2["fp16"]["hysteresis"] == 1


# ------------------------------------------------------------------ kinds: every key, any value

SPECS = sorted(CONFIG_KEYS)
SECTIONS = ["optimizer", "optimizer.params", "fp16", "bf16", ZERO, f"{ZERO}.offload_optimizer",
            "checkpoint", "compile"]
VALUES = {"string": "banana", "empty": "", "bool": True, "null": None, "list": [1],
          "object": {"a": 1}, "empty object": {}, "fraction": 0.5, "negative": -1, "zero": 0,
          "huge": 10 ** 400, "large": 1e300, "infinite": math.inf, "nan": math.nan, "auto": "auto",
          "one": 1, "number in a string": "1", "true in a string": "true"}


def meaning_is_kept(path, value, result):
    """Whether the resolved value is the written one, with the exact type that the key takes."""
    kind = CONFIG_KEYS[path].kind
    assert result == value and (type(result) is kind or kind is float and type(result) is int)
    assert type(value) is type(result) or type(value) is float and value.is_integer()
    spec = CONFIG_KEYS[path]
    assert spec.choices is None or result in spec.choices
    if kind in (int, float):
        assert (spec.low is None or result >= spec.low) and (
            spec.high is None or result <= spec.high)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("path", SPECS)
def test_any_value_at_any_key_is_refused_or_kept(path, name):
    value = VALUES[name]
    try:
        result = check_config(changed(path, value), 1)
    except Refused as error:
        named = path.rpartition(".")[0] if isinstance(value, dict) else path
        assert named in str(error) or "train_batch_size" in str(error)
        assert name != "auto" or "Hugging Face Trainer" in str(error)
    else:
        meaning_is_kept(path, value, result[path])
        assert name not in ("null", "auto", "object", "empty object", "infinite", "nan", "huge")


@pytest.mark.parametrize("value", [None, 1, "a", True, [], "auto"])
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_takes_an_object_only(section, value, tmp_path):
    assert section in refusal(plan, changed(section, value), tmp_path)


def test_an_empty_section_is_an_empty_section(tmp_path):
    for section in ("fp16", "bf16", ZERO, f"{ZERO}.offload_optimizer", "checkpoint"):
        [run] = plan(changed(section, {}), tmp_path)
        assert not any(key.startswith(f"{section}.") and key != f"{ZERO}.stage"
                       for key in run.config)


@pytest.mark.parametrize("path, meant", [
    ("gradient_cliping", "gradient_clipping"), ("optimizer.params.learning_rte", None),
    ("optimizer.params.weight_decy", "weight_decay"), ("optimizer.typ", "optimizer.type"),
    ("fp16.hysteresys", "fp16.hysteresis"), (f"{ZERO}.stages", f"{ZERO}.stage"),
    (f"{ZERO}.offload_optimizer.devices", "device"), ("stage", f"{ZERO}.stage"),
    (f"{ZERO}.offload_optimiser", "offload_optimizer"), ("bf_16", "bf16"),
    ("activation_checkpointing", None), ("scheduler", None), ("x", None), ("", None)])
def test_unknown_keys_at_each_depth(path, meant, tmp_path):
    message = refusal(plan, changed(path, 1), tmp_path)
    assert f'"{path}"' in message
    assert ("did you mean" in message and meant in message) if meant else "remove" in message


@pytest.mark.parametrize("extra", [
    '"zero_optimization.stage": 0', '"fp16.enabled": false', '"": {}', '"": null', '"fp16.": 1',
    '"gradient_clipping.x": 1', '"a": 1, "a.b": 2', '".": 1', '"zero_optimization": {"a.b": 1}',
    '"optimizer.params": {"lr": 1}', '"a\\nb": 1', '"\\ud800": 1', '"bf16": {"": 1}',
    '"bf16": {"enabled.x": 1}', '"bf16": {"": {}}'])
def test_a_dot_is_no_section_and_odd_names_are_refused(extra, tmp_path):
    text = json.dumps({k: v for k, v in GOOD.items() if k != ZERO})
    refusal(plan, text[:-1] + f", {extra}}}", tmp_path)


@pytest.mark.parametrize("keys, ranks, resolved", [
    ({"train_micro_batch_size_per_gpu": 3}, 2, (6, 3, 1)),
    ({"train_batch_size": 12}, 2, (12, 6, 1)),
    ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, 2, (12, 2, 3)),
    ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, 2, (12, 2, 3)),
    ({"train_batch_size": 3}, 1, (3, 3, 1)),
    ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}, 4, (48, 3, 4)),
    ({"train_batch_size": 3}, 2, None),
    ({"train_batch_size": 1}, 2, None),
    ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 5}, 2, None),
    ({"train_batch_size": 12, "gradient_accumulation_steps": 5}, 2, None),
    ({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 3}, 1, None),
    ({"gradient_accumulation_steps": 2}, 1, None)])
def test_batch_equation(keys, ranks, resolved):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    written = {k: v for k, v in GOOD.items() if k not in names} | keys
    if resolved:
        assert tuple(check_config(written, ranks)[name] for name in names) == resolved
    else:
        message = refusal(check_config, written, ranks)
        assert "train_micro_batch_size_per_gpu" in message
        for number in (keys.get("train_batch_size", ""), f"{ranks} ranks"):
            assert str(number) in message or "no batch size" in message


@pytest.mark.parametrize("path, value, word", [
    ("optimizer.params.torch_adam", False, "torch_adam"),
    ("optimizer.params.torch_adam", ..., "torch_adam"),
    (f"{ZERO}.stage", 3, "0, 1, 2"), (f"{ZERO}.stage", -1, "0, 1, 2"),
    (f"{ZERO}.stage", True, "0, 1, 2"), ("optimizer.type", "adamw", "AdamW"),
    ("optimizer.params.betas", [0.9, 1.0], "betas"), ("optimizer.params.betas", [0.9], "betas"),
    ("optimizer.params.betas", [True, 0.9], "betas"), ("optimizer.params.lr", -1e-5, "lr"),
    ("optimizer.params.eps", 0, "from 1e-30"),              # 0 / 0 where a gradient is 0
    ("optimizer.params.lr", "5e-5", '5e-5, not "5e-5"'), ("fp16.enabled", "false", "true or false"),
    (f"{ZERO}.overlap_comm", "no", "true or false"), (f"{ZERO}.overlap_comm", 1, "true or false")])
def test_further_values(path, value, word):
    assert word in refusal(check_config, changed(path, value), 1)


# --------------------------------------------------------------------------------------- fuzz

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.integers(0, 10 ** 11) | st.integers(0, 4).map(float) | st.just("auto")
    | st.sampled_from([10 ** 400, -10 ** 400, 5e7, 1e19, "5e7", "cpu", "AdamW", [0.9, 0.99]]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=6) | st.sampled_from(["enabled", "stage", "lr"]), inner,
                      max_size=3), max_leaves=6)
NAMES = (st.sampled_from([*SPECS, *SECTIONS, "", "."]) | st.text(max_size=6)
         | st.sampled_from(SPECS).map(lambda path: path + "s"))


def leaves(config, prefix=()):
    """(path as a tuple of names, value) of everything in a config that is not a filled section."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value


@settings(max_examples=1500)
@given(st.lists(st.tuples(NAMES, JSON, st.booleans()), min_size=1, max_size=3), st.integers(1, 5))
def test_fuzzed_config_is_refused_or_means_what_is_written(tmp_path, entries, ranks):
    config = copy.deepcopy(GOOD)
    for path, value, nested in entries:
        section, parts = config, path.split(".") if nested else [path]
        for part in parts[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                return
        section[parts[-1]] = value
    text = json.dumps(config)
    try:
        [run] = plan(text, tmp_path, ranks=ranks)
    except Refused as error:
        assert len(re.split(r"[\r\n]", str(error))) == 1 and "c.json" in str(error)
        return
    written = json.loads(text)
    for names, value in leaves(written):
        if value != {}:
            path = ".".join(names)
            assert "." not in "".join(names) and path in CONFIG_KEYS
            meaning_is_kept(path, value, run.config[path])
    # What DeepSpeed is given holds nothing else, but for the defaults that are stated.
    added = set(run.config) - {".".join(names) for names, _ in leaves(written)}
    assert added <= {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping",
                     "gradient_accumulation_steps", f"{ZERO}.stage", "optimizer.params.lr"}
    micro, accumulation = (run.config[key] for key in (
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    assert run.config["train_batch_size"] == micro * accumulation * ranks


@settings(max_examples=500)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode)
       | st.integers(0, 300).map(lambda n: json.dumps(GOOD).encode()[:n]))
def test_fuzzed_file_is_refused(tmp_path, data):
    assert "c.json" in refusal(plan, data, tmp_path)


@settings(max_examples=500)
@given(st.sampled_from(["stage", "reduce_bucket_size", "fp16.enabled", "optimizer.params.lr"])
       | st.text(max_size=8), st.text(max_size=12) | JSON.map(json.dumps))
def test_fuzzed_sweep_is_refused_or_means_what_is_written(tmp_path, key, value):
    try:
        runs = plan(GOOD, tmp_path, f"--sweep={key}={value}")
    except Refused as error:
        assert len(re.split(r"[\r\n]", str(error))) == 1
        return
    path = key if key in CONFIG_KEYS else f"{ZERO}.{key}"
    parts = value.split(",")
    for run in runs:
        assert run.config[path] in [json.loads(part) for part in parts]


# ------------------------------------------------------------------------------------- sweeps

@pytest.mark.parametrize("sweeps, names", [
    (["stage=0,1,2"], ["stage=0", "stage=1", "stage=2"]),
    (["reduce_bucket_size=1e6,5e7"], ["reduce_bucket_size=1e6", "reduce_bucket_size=5e7"]),
    (["stage=1,2", "reduce_bucket_size=1e6,1e7"],
     [f"stage={s} reduce_bucket_size={b}" for s in (1, 2) for b in ("1e6", "1e7")]),
    (["stage=0,2", "reduce_bucket_size=1e6,1e7"],
     ["stage=0", "stage=2 reduce_bucket_size=1e6", "stage=2 reduce_bucket_size=1e7"]),
    (["gradient_clipping=0.5,1"], ["gradient_clipping=0.5", "gradient_clipping=1"]),
    (["optimizer.params.lr=1e-4,1e-3"], ["optimizer.params.lr=1e-4", "optimizer.params.lr=1e-3"]),
    (["optimizer.params.betas=[0.9,0.99],[0.9,0.95]"],
     ["optimizer.params.betas=[0.9,0.99]", "optimizer.params.betas=[0.9,0.95]"]),
    (["zero_optimization.stage=1,2"], ["stage=1", "stage=2"]),
])
def test_sweep_names_its_runs(sweeps, names, tmp_path):
    runs = plan(GOOD, tmp_path, *[f"--sweep={sweep}" for sweep in sweeps])
    assert [run.name for run in runs] == [f"c {name}" for name in names]
    for run, name in zip(runs, names):
        for key, text in (part.split("=") for part in name.split()):
            path = key if key in CONFIG_KEYS else f"{ZERO}.{key}"
            assert run.config[path] == json.loads(text) == run.swept[path]


def test_a_key_of_a_precision_that_is_not_used_runs_once(tmp_path):
    runs = plan(GOOD, tmp_path, "--sweep", "fp16.enabled=true,false", "--sweep",
                "fp16.initial_scale_power=10,12")
    assert [run.name for run in runs] == [
        "c fp16.enabled=true fp16.initial_scale_power=10",
        "c fp16.enabled=true fp16.initial_scale_power=12", "c fp16.enabled=false"]
    [run] = plan(GOOD, tmp_path, "--precision", "fp32", "--sweep", "fp16.hysteresis=1,2")
    assert run.swept == {}


def test_a_bucket_sweep_runs_stage_0_once(tmp_path):
    runs = plan_runs(parse_arguments(["--config", str(STAGE0), str(ZERO2), "--sweep",
                                      "reduce_bucket_size=1e6,1e7"]), 2)
    assert [run.config[f"{ZERO}.stage"] for run in runs] == [0, 2, 2]


@pytest.mark.parametrize("section", [{}, ...])
def test_sweep_of_a_section_that_is_empty_or_not_there(section, tmp_path):
    runs = plan(changed(ZERO, section), tmp_path, "--sweep", "stage=0,1,2")
    assert [run.config[f"{ZERO}.stage"] for run in runs] == [0, 1, 2]


@pytest.mark.parametrize("sweep, words", [
    ("reduce_bucket_sise=1,2", ["did you mean", "reduce_bucket_size"]),
    ("banana=1", ["banana"]), ("stage", ["KEY="]), ("stage=", ["KEY="]), ("stage=0,,2", ["KEY="]),
    ("=1", []), ("stage=3", ["stage"]), ("stage=two", ["stage"]), ("stage=true", ["stage"]),
    ("stage=" + "[" * 100000, ["stage"]), ("reduce_bucket_size=1e6,0", ["reduce_bucket_size"]),
    ("reduce_bucket_size=NaN", ["reduce_bucket_size"]), ("fp16.enabled=1", ["fp16.enabled"]),
    ("reduce_bucket_size=" + "9" * 400, ["reduce_bucket_size"]),
    ("allgather_bucket_size=3", ["even"]), ("train_batch_size=3", ["2 ranks"])])
def test_wrong_sweeps_are_refused(sweep, words, tmp_path):
    message = refusal(plan, GOOD, tmp_path, f"--sweep={sweep}", ranks=2)
    assert all(word in message for word in words), message
    assert len(message) < 400


# -------------------------------------------------------------------------------- command line

@pytest.fixture(scope="module")
def no_torch(tmp_path_factory):
    """A folder for PYTHONPATH in which importing torch and the like ends the process."""
    folder = tmp_path_factory.mktemp("no_torch")
    for name in ("torch", "deepspeed", "transformers", "numpy", "matplotlib", "huggingface_hub"):
        (folder / f"{name}.py").write_text("import os\nos._exit(77)\n")
    return folder


def script(*arguments, no_torch, attempts=3, env=None):
    """Run the script without torch; returns status, stdout, stderr and the least seconds."""
    seconds = []
    for _ in range(attempts):                       # the machine may be busy with something else
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True,
            timeout=60, env=os.environ | {"PYTHONPATH": str(no_torch)} | (env or {}))
        seconds.append(time.perf_counter() - begin)
        if seconds[-1] < 0.6:
            break
    return done.returncode, done.stdout, done.stderr, min(seconds)


def test_whole_betas_become_floats():
    config = check_config(changed("optimizer.params.betas", [0, 0]), 1)
    assert [type(beta) for beta in config["optimizer.params.betas"]] == [float, float]


def test_help_is_quick_and_names_every_flag(no_torch):
    status, out, err, seconds = script("--help", no_torch=no_torch)
    assert (status, err) == (0, "") and seconds < 0.6
    for flag in ("--config", "--sweep", "--steps", "--seq-len", "--model", "--random-weights",
                 "--data", "--precision", "--share-gpu", "--seed", "--compile", "--json", "--plot",
                 "--memory-snapshot", "--save", "--checkpoint", "--checkpoint-every", "--resume",
                 "--verbose"):
        assert flag in out


@pytest.mark.parametrize("arguments, words", [
    (["--config", "c.json"], ["c.json", "reduce_bucket_size"]),
    (["--config", "none.json"], ["none.json"]),
    (["--steps", "0"], ["--steps", "1"]), (["--steps", "1.5"], ["--steps"]),
    (["--steps", "-3"], ["--steps"]), (["--steps", "9" * 30], ["--steps"]),
    (["--seq-len", "1"], ["--seq-len"]), (["--seed", "-1"], ["--seed"]),
    (["--precision", "int8"], ["--precision", "bf16"]), (["--banana"], ["--banana"]),
    (["stray"], ["stray"]), (["--step", "3"], ["--step"]), (["--resume"], ["--checkpoint"]),
    (["--checkpoint-every", "2"], ["--checkpoint"]), (["--sweep", "banana=1"], ["banana"]),
    (["--json", "/nowhere/r.json"], ["--json", "/nowhere"]),
    (["--json", "/"], ["--json", "folder"]),
    (["--json", "/proc/r.json"], ["--json", "/proc"]), (["--plot", "p.pdf"], ["--plot", ".png"]),
    (["--plot", "/proc/p.png"], ["--plot"]), (["--save", "/proc/model"], ["--save", "/proc"]),
    (["--checkpoint", "c.json/x"], ["--checkpoint"]), (["--save", "c.json"], ["--save", "folder"]),
    (["--memory-snapshot", "/nowhere/m"], ["--memory-snapshot", "/nowhere"]),
    (["--data", "none.txt"], ["--data", "none.txt"]), (["--data", "/"], ["--data"]),
    (["--save", "out", "--sweep", "stage=0,2"], ["--save", "one run"]),
    (["--checkpoint", "out", "--sweep", "stage=0,2"], ["--checkpoint", "one run"]),
    (["--checkpoint", "out", "--resume"], ["--resume", "out"]),
    (["--seq-len", "2000"], ["--seq-len", "1024"]),
    (["--sweep", "stage=0", "--sweep", "stage=2"], ["--sweep", "twice"]),
    (["--precision", "fp32", "--sweep", "fp16.enabled=true,false"], ["--precision"]),
])
def test_wrong_input_is_refused_in_one_line_before_torch(arguments, words, no_torch, tmp_path,
                                                         monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text(json.dumps(changed(f"{ZERO}.reduce_bucket_size", "5e7")))
    status, out, err, seconds = script(*arguments, no_torch=no_torch)
    assert status == 2 and out == "" and err.count("\n") == 1
    assert all(word in err for word in ["train_zero2: refused", *words]), err
    assert seconds < 0.6
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.parametrize("arguments", [["--seq-len", "64"],
                                       ["--seq-len", "2000", "--model", "some/model"]])
def test_positions_are_those_of_the_model_alone(arguments, no_torch, tmp_path, monkeypatch):
    """Not of a config.json that lies in the working folder; unknown before a Hub model is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_positions": 8}')
    status, _, err, _ = script(*arguments, no_torch=no_torch)
    assert status == 77 and "refused" not in err                 # it went on to import torch


@pytest.mark.parametrize("arguments, words", [
    (["--config", "good.json", "--json", "good.json"], ["--json", "--config", "overwrite"]),
    (["--data", "d.txt", "--json", "link"], ["--json", "--data"]),
    (["--json", "x.png", "--plot", "x.png"], ["--plot", "--json"]),
    (["--save", "s", "--checkpoint", "s"], ["--checkpoint", "--save"]),
    (["--json", "pipe"], ["--json", "regular"]),
    (["--model", "kept", "--json", "kept/config.json"], ["--json", "--model"]),
    (["--checkpoint", "kept", "--resume", "--json", "kept/latest"], ["--json", "--checkpoint"]),
    (["--checkpoint", "new", "--save", "new/step10"], ["--save", "--checkpoint"]),
    (["--checkpoint", "kept"], ["--checkpoint", "--resume"])])
def test_an_output_never_replaces_something_else(arguments, words, no_torch, tmp_path,
                                                 monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.json").write_text(json.dumps(GOOD))
    (tmp_path / "d.txt").write_text("text")
    (tmp_path / "link").symlink_to("d.txt")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "latest").write_text("step2")
    os.mkfifo(tmp_path / "pipe")
    status, _, err, _ = script(*arguments, no_torch=no_torch)
    assert status == 2 and err.count("\n") == 1 and all(word in err for word in words), err
    assert (tmp_path / "good.json").read_text() == json.dumps(GOOD)
    assert (tmp_path / "d.txt").read_text() == "text"


def test_defaults_and_repeated_flags():
    args = parse_arguments(["--config", "a", "b", "--deepspeed_config", "c", "--sweep", "x=1",
                            "--sweep", "y=2", "--local_rank", "3"])
    assert [str(path) for path in args.config] == ["a", "b", "c"] and args.sweep == ["x=1", "y=2"]
    args = parse_arguments([])
    assert args.config == [ZERO2] and (args.steps, args.seq_len, args.seed) == (10, 64, 0)
    assert args.precision == "auto" and args.json is None


@pytest.mark.parametrize("by, status", [("torchrun", 1), ("deepspeed", 2)])
def test_two_ranks_refuse_at_once_and_in_one_line(by, status, tmp_path):
    config = changed("train_micro_batch_size_per_gpu", ...) | {"train_batch_size": 3}
    (tmp_path / "c.json").write_text(json.dumps(config))
    result = launch(tmp_path, "--config", "c.json", by=by, ok=False, timeout=60)
    said = result.out + result.err
    assert result.rc == status and result.record is None
    assert "3 is not" in said and "2 ranks" in said and "train_micro_batch_size_per_gpu" in said
    assert said.count("train_zero2: refused") == 1
    assert "Traceback" not in said.split("train_zero2: refused")[0]


# -------------------------------------------------------------------------------- launchers

@pytest.mark.parametrize("env, expected", [
    ({}, (0, 1, 0)),
    ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, (1, 4, 0)),
    ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
      "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, (3, 4, 1)),
    ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0",
      "MASTER_ADDR": "node1"}, (2, 4, 0)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, (0, 1, 0)),  # sbatch's shell
    ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "OMPI_COMM_WORLD_RANK": "0",
      "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, (1, 2, 1)),
])
def test_ranks_from_each_launcher(env, expected):
    with mock.patch.dict(os.environ, env, clear=True):
        launch = train_zero2.read_launch()
        assert (launch.rank, launch.world_size, launch.local_rank) == expected
        assert [os.environ[name] for name in ("RANK", "WORLD_SIZE")] == [
            str(launch.rank), str(launch.world_size)]
        assert os.environ["MASTER_ADDR"] == env.get("MASTER_ADDR", "127.0.0.1")
        assert os.environ["MASTER_PORT"].isdigit()


@pytest.mark.parametrize("env", [
    {"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    {"RANK": "", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    {"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0"},
    {"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}])
def test_a_rank_that_cannot_be_is_refused(env, no_torch):
    with mock.patch.dict(os.environ, env, clear=True):
        assert "RANK" in refusal(train_zero2.read_launch)
    status, _, err, _ = script(no_torch=no_torch, env=env)
    assert status == 2 and err.count("\n") == 1 and "RANK" in err


# ------------------------------------------------------------------- the table against DeepSpeed

FIELDS = """
import inspect, json, torch
import deepspeed.runtime.constants as constants
from deepspeed.compile.config import CompileConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
models = {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config,
          "bf16": DeepSpeedBF16Config, "compile": CompileConfig,
          "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig}
fields = {s: [name for n, f in m.model_fields.items() for name in (n, f.alias) if name]
          for s, m in models.items()}
fields[""] = [value for value in vars(constants).values() if isinstance(value, str)]
fields["checkpoint"] = [constants.LOAD_UNIVERSAL_CHECKPOINT]
fields["optimizer"] = [constants.TYPE, constants.OPTIMIZER_PARAMS]
fields["optimizer.params"] = ["torch_adam", *inspect.signature(torch.optim.AdamW).parameters]
defaults = {s: {n: f.default for n, f in m.model_fields.items()
                if type(f.default) in (int, float, bool)} for s, m in models.items()}
print("FIELDS", json.dumps([fields, defaults]))
"""


def test_table_holds_against_the_installed_deepspeed():
    done = subprocess.run([sys.executable, "-c", FIELDS], capture_output=True, text=True,
                          check=True, timeout=120, cwd=ROOT)
    fields, defaults = json.loads(done.stdout.split("FIELDS", 1)[1])
    for path, spec in CONFIG_KEYS.items():
        section, _, name = path.rpartition(".")
        assert name in fields[section], path
        default = defaults.get(section, {}).get(name)
        if default is not None:                    # DeepSpeed's own default has the key's type
            assert isinstance(default, bool) == (spec.kind is bool), path
