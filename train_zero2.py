#!/usr/bin/env python3
"""What does DeepSpeed ZeRO stage 2 do to GPT-2 training, on this machine?

Trains GPT-2 for a few steps through `deepspeed.initialize`, as a DeepSpeed JSON says, and measures:
  1. how much memory stage 2 saves against stage 0 (plain data parallelism), on which rank and in
     which phase; what of it is the optimizer states (stage 1) and what the gradients (stage 2);
  2. whether training is still right: the loss falls, and it is the same at every stage;
  3. what bucket sizes do to memory and time, and which setting to use.

    python train_zero2.py                                  # one process, on a GPU or a CPU
    deepspeed --num_gpus=2 train_zero2.py --config ds_config_zero2.json
    deepspeed --num_gpus=2 train_zero2.py --config ds_config_stage0.json ds_config_zero2.json
    deepspeed --num_gpus=2 train_zero2.py --sweep reduce_bucket_size=1e6,1e7,5e7
    torchrun --nproc-per-node=4 train_zero2.py --sweep stage=0,1,2 --share-gpu    # one card will do

Rank 0 prints a line a step, peak memory by phase (expected beside measured) and, for several runs,
a comparison, verdicts (PASS, FAIL, NOT APPLICABLE) and a recommendation; --json FILE holds every
figure raw (bytes, seconds). Exit status: 0 well, 1 a verdict or a run failed, 2 input refused, 130
interrupted. The page: 1 constants, 2 command line, 3 configuration, 4 ranks and devices, 5 model
and batches, 6 measuring, 7 one run, 8 several runs, 9 output, 10 main.
"""
import argparse
import array
import contextlib
import copy
import ctypes
import dataclasses
import datetime
import difflib
import errno
import gc
import importlib.metadata
import io
import itertools
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from pathlib import Path

# ------------------------------------------------------------------------------ 1. constants

GB, MB = 1e9, 1e6                      # decimal, as on a data sheet
WARMUP_STEPS = 3                       # allocator and kernel caches fill; enter no verdict
HUB_WAIT_SECONDS = 15                  # then the Hub counts as unreachable
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)    # a rank that stalls longer ends the launch
AGREE_TIMEOUT = datetime.timedelta(seconds=20)         # for every rank to say that a run failed
REFUSAL_DELAY_SECONDS = 2              # a launcher that sees another rank exit kills rank 0 unheard
LOSS_TOLERANCE = 1e-3                  # relative; a wrong optimizer step shows as 3e-2 at step 2
LOSS_STEPS = 6                         # judged so; rounding (1e-7 at step 2) is 1e-2 by step 20
LOSS_DRIFT = 1e-2                      # of the first loss, at later steps; seen are 6e-4 at most
MEMORY_NOISE = 0.01                    # relative; the same run twice differs by less on a GPU
TIMED_STEPS = 5                        # fewer steady steps tell nothing about time
TIME_NOISE = 0.02                      # relative, or the interquartile range where that is larger
STAGE0_BUCKET = 500_000_000            # elements; MEMORY_OPT_ALLREDUCE_SIZE in DeepSpeed's engine
IGNORED = -100                         # label that no loss is taken from
NA = "NOT APPLICABLE"
MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors*", "vocab.json",
               "merges.txt", "tokenizer*.json", "special_tokens_map.json")

HERE = Path(__file__).resolve().parent
PHASES = ("init", "forward", "backward", "step")
SENTENCES = ("DeepSpeed enables large model training with ZeRO.",
             "Gradient partitioning reduces memory redundancy across GPUs.",
             "GPT-2 is a transformer-based language model.")
GPT2_SIZES = {"gpt2-tiny": (64, 2, 2), "gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16),
              "gpt2-large": (1280, 36, 20), "gpt2-xl": (1600, 48, 25)}  # width, layers, heads


class Refused(Exception):
    """The user's input cannot be used. The message is one line: what, where and the fix."""


class RunFailed(Exception):
    """A run ended early. The message is one line: where, the cause and what would help."""


# --------------------------------------------------------------------------- 2. command line

class ArgumentParser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(f"{message} (see --help)")

    def print_help(self, file=None):
        if os.environ.get("RANK", "0") == "0":                    # once per launch
            super().print_help(file)


def parse_arguments(argv):
    """Parse the command line; answers --help by itself. Raises Refused."""
    def count(low):
        def parse(text):
            if not re.fullmatch(r"\d{1,9}", text) or int(text) < low:
                raise argparse.ArgumentTypeError(f"a whole number from {low} on, not {text!r}")
            return int(text)
        return parse

    parser = ArgumentParser(
        prog="train_zero2.py", allow_abbrev=False, description=__doc__.split("\n\n")[0],
        epilog="Batch sizes, learning rate, precision, stage and buckets are set in the JSON.")
    add = parser.add_argument
    add("--config", "--deepspeed_config", nargs="+", type=Path, metavar="FILE", action="extend",
        help="DeepSpeed JSON; several are run in turn and compared (ds_config_zero2.json)")
    add("--sweep", action="append", default=[], metavar="KEY=V1,V2,...",
        help="one run per value of a config key; repeatable: the product")
    add("--steps", type=count(1), default=10, help="optimizer steps per run, in all (10)")
    add("--seq-len", type=count(2), default=64, help="tokens per sample (64)")
    add("--model", metavar="NAME_OR_DIR", help="Hugging Face name or local folder (gpt2)")
    add("--random-weights", action="store_true",
        help=f"no download; knows {', '.join(GPT2_SIZES)} without a network")
    add("--data", type=Path, metavar="FILE", help="UTF-8 text (three built-in sentences)")
    add("--precision", choices=("auto", "fp16", "bf16", "fp32"), default="auto",
        help="auto: the JSON's where the device can do it, else fp32")
    add("--share-gpu", action="store_true", help="several ranks on one GPU")
    add("--seed", type=count(0), default=0, help="weights, data order and dropout (0)")
    add("--compile", action="store_true", help="compiled engine; builds kernels at run time")
    add("--json", type=Path, metavar="FILE", help="the whole record, raw")
    add("--plot", type=Path, metavar="FILE", help="PNG of the comparison")
    add("--memory-snapshot", type=Path, metavar="FILE",
        help="allocator snapshot of one steady step per run and rank, for pytorch.org/memory_viz")
    add("--save", type=Path, metavar="DIR", help="fp32 weights and tokenizer for from_pretrained")
    add("--checkpoint", type=Path, metavar="DIR", help="engine checkpoints, the last one kept")
    add("--checkpoint-every", type=count(1), metavar="N", help="steps (only at the end)")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    add("--verbose", action="store_true", help="DeepSpeed's own log lines and warnings")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.config = args.config or [HERE / "ds_config_zero2.json"]
    return args


def check_versions():
    """Refuse packages that are missing, or older than requirements.txt says was run."""
    listed = HERE / "requirements.txt"
    for line in listed.read_text().split() if listed.exists() else []:
        name, _, oldest = line.partition(">=")
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise Refused(f"{name} is not installed: pip install -r requirements.txt") from None
        if [*map(int, re.findall(r"\d+", found)[:3])] < [*map(int, oldest.split("."))]:
            raise Refused(f"{name} {found} is older than {oldest}, the oldest that this was run "
                          "with" + "; some older ones train wrongly" * (name == "deepspeed")
                          + ": pip install -r requirements.txt")


def check_arguments(args, runs):
    """Refuse flags that do not go together and outputs that cannot be written, before any load."""
    if not args.checkpoint and (args.resume or args.checkpoint_every):
        raise Refused("--resume and --checkpoint-every need --checkpoint DIR")
    if args.data and not os.path.isfile(args.data):
        raise Refused(f"--data {args.data}: no such file")
    if args.precision != "auto" and any(f"{p}.enabled" in run.swept for run in runs
                                        for p in ("fp16", "bf16")):
        raise Refused("--precision and a sweep over a precision: choose one of them")
    if args.plot and args.plot.suffix.lower() != ".png":
        raise Refused(f"--plot {args.plot}: writes PNG; end the name in .png")
    if args.compile and not any(map(shutil.which, ("cc", "gcc", "g++", "clang"))):
        raise Refused("--compile: needs a C++ compiler, and none is on the PATH")
    if not args.compile and any(run.config.get("compile.deepcompile") for run in runs):
        raise Refused('"compile.deepcompile": true needs --compile')
    positions, model = 1024, args.model or "gpt2"
    with contextlib.suppress(OSError, ValueError, AttributeError):        # checked when loaded
        if model not in GPT2_SIZES or (args.model and os.path.isdir(model)):
            positions = json.loads((Path(model) / "config.json").read_text()).get("n_positions")
        check_positions(args, positions)
    check_outputs(args, runs)


def check_positions(args, positions):
    """Refuse more tokens than the model has positions (None: not known yet)."""
    if type(positions) is int and args.seq_len > positions:
        raise Refused(f"--seq-len {args.seq_len}: the model has {positions} positions; use fewer")


def check_outputs(args, runs):
    """Refuse outputs that cannot be written, or would overwrite an input or another output."""
    def real(path):
        return Path(os.path.realpath(path))           # links followed, also where nothing is yet

    used = {real(__file__): "this script"} | {real(path): "--config" for path in args.config}
    used |= {real(args.data): "--data"} if args.data else {}
    if args.save and args.checkpoint and real(args.save) in real(args.checkpoint).parents:
        raise Refused(f"--checkpoint {args.checkpoint}: inside --save; name a folder beside it")
    for flag in ("json", "plot", "memory_snapshot", "save", "checkpoint"):
        path, folder = getattr(args, flag), flag in ("save", "checkpoint")
        if path is None:
            continue
        name = f"--{flag.replace('_', '-')} {path}"
        if folder and len(runs) > 1:
            raise Refused(f"{name}: takes one run; this command makes {len(runs)}")
        for outer, files in (("model", MODEL_FILES), ("checkpoint", ("latest", "step*"))):
            within = real(getattr(args, outer) or os.devnull)
            if within in real(path).parents and any(map(
                    Path(real(path).relative_to(within).parts[0]).match, files)):
                raise Refused(f"{name}: belongs to what is in --{outer}; name another")
        taken = used.setdefault(real(path), name)
        if taken is not name:
            raise Refused(f"{name}: the same as {taken}, which it would overwrite; name another")
        try:
            if path.exists() and not path.is_dir() and not path.is_file():
                raise Refused(f"{name}: is no regular file; name another")
            if path.exists() and path.is_dir() != folder:
                raise Refused(f"{name}: {'not a' if folder else 'is a'} folder; name another")
            if flag == "save" and path.is_dir() and (any(path.iterdir()) or os.path.ismount(path)):
                raise Refused(f"{name}: the folder is not empty or a mount point; name a new one")
            if flag == "checkpoint" and (path / "latest").exists() and not args.resume:
                raise Refused(f"{name}: holds a checkpoint; add --resume, or name a new folder")
            if not folder and not path.absolute().parent.is_dir():
                raise Refused(f"{name}: no folder {path.parent}; create it first")
            parent = next(p for p in (path, *path.absolute().parents) if p.exists() and (
                folder or p.is_dir()))
            with tempfile.TemporaryFile(dir=parent):
                pass
        except OSError as error:
            raise Refused(f"{name[:200]}: cannot write there: {error.strerror}") from None


# -------------------------------------------------------------------------- 3. configuration

@dataclasses.dataclass(frozen=True)
class Key:
    """What one configuration key takes: an exact type, inclusive bounds or a set of choices."""
    kind: type
    low: float = 0
    high: float = 1e9
    choices: tuple = None

    def __str__(self):
        if self.choices:
            return "one of " + ", ".join(json.dumps(c) for c in self.choices)
        noun = {int: "a whole number", float: "a number", list: "two numbers"}.get(self.kind)
        to = "to below" if self.kind is list else "to"
        bounds = f"{noun} from {self.low:g} {to} {self.high:g}".replace("e+", "e")
        return bounds if noun else "true or false"


ZERO = "zero_optimization."
STAGE, BUCKET, ALLGATHER = (ZERO + k for k in (
    "stage", "reduce_bucket_size", "allgather_bucket_size"))
MICRO, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
CONFIG_KEYS = {                                               # bucket sizes count elements
    "train_batch_size": Key(int, 1), MICRO: Key(int, 1), ACCUMULATION: Key(int, 1),
    "gradient_clipping": Key(float), "steps_per_print": Key(int, 1),
    "optimizer.type": Key(str, choices=("Adam", "AdamW")),
    "optimizer.params.lr": Key(float, 0, 1e3), "optimizer.params.betas": Key(list, 0, 1),
    "optimizer.params.eps": Key(float, 1e-30, 1), "optimizer.params.torch_adam": Key(bool),
    "optimizer.params.weight_decay": Key(float, 0, 1e3), "optimizer.params.fused": Key(bool),
    "fp16.enabled": Key(bool), "fp16.loss_scale": Key(float, 0, 2.0 ** 60),
    "fp16.initial_scale_power": Key(int, 0, 60), "fp16.loss_scale_window": Key(int, 1),
    "fp16.hysteresis": Key(int, 1), "fp16.min_loss_scale": Key(int, 1, 2 ** 60),
    "bf16.enabled": Key(bool), "bf16.check_grad_overflow": Key(bool),
    STAGE: Key(int, choices=(0, 1, 2)), BUCKET: Key(int, 1, 1e10), ALLGATHER: Key(int, 2, 1e10),
    **{ZERO + name: Key(bool) for name in (
        "overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions",
        "use_multi_rank_bucket_allreduce", "round_robin_gradients", "compute_grad_norm",
        "offload_optimizer.pin_memory")},
    ZERO + "offload_optimizer.device": Key(str, choices=("cpu", "none")),
    "checkpoint.load_universal": Key(bool), "compile.deepcompile": Key(bool),
}
SECTIONS = {path[:dot.start()] for path in CONFIG_KEYS for dot in re.finditer(r"\.", path)}


def read_config(path):
    """Parse one JSON file into a dict. Raises Refused: the place and the fix, but not the file."""
    def unique(pairs):
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise Refused(f"{json.dumps(twice)} stands twice in one section; remove one")
        return dict(pairs)

    def no_constant(text):
        raise Refused(f"{text} is not JSON; write a finite number")

    try:
        text = path.read_bytes().decode("utf-8-sig")
        config = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except OSError as error:
        raise Refused(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Refused(f"not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise Refused(f"line {error.lineno}, column {error.colno}: not JSON: {error.msg} "
                      "(JSON has no comments and no trailing commas)") from None
    except (ValueError, RecursionError) as error:      # a number of 5,000 digits, 10,000 brackets
        raise Refused(f"not usable JSON: {str(error)[:60]}; write it plainly") from None
    if not isinstance(config, dict):
        raise Refused(f"must hold one JSON object {{...}}, not a {type(config).__name__}")
    return config


def flatten(config, prefix=""):
    """Nested dict to {dotted path: value}; only known sections are descended into."""
    flat = {}
    for name, value in config.items():
        if "." in name:                               # would pass for a key inside a section
            raise Refused(f"{json.dumps(name[:80])}: a dot is no section; nest the key")
        if prefix + name in SECTIONS and isinstance(value, dict):
            flat |= flatten(value, prefix + name + ".")
        else:
            flat[prefix + name] = value
    return flat


def unflatten(flat):
    """{dotted path: value} to the nested dict that DeepSpeed takes."""
    config = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return config


def check_value(path, value):
    """Return value in its exact type (5e7 becomes 50000000). Raises Refused with the fix."""
    spec, shown = CONFIG_KEYS[path], json.dumps(value)[:60]
    if value == "auto":
        raise Refused(f'"{path}": "auto" belongs to the Hugging Face Trainer, which fills it in; '
                      f"write {spec}")
    if spec.kind in (int, float):
        fits = type(value) in (int, float) and spec.low <= value <= spec.high and (
            spec.kind is float or value == int(value))
        value = int(value) if fits and spec.kind is int else value
    elif spec.kind is list:
        fits = type(value) is list and len(value) == 2 and all(
            type(v) in (int, float) and spec.low <= v < spec.high for v in value)
        value = [*map(float, value)] if fits else value
    else:
        fits = type(value) is spec.kind
    if fits and (spec.choices is None or value in spec.choices):
        return value
    fix = f"write {spec}"
    if type(value) is str and spec.kind is not str:
        with contextlib.suppress(ValueError, RecursionError, Refused):
            check_value(path, json.loads(value))
            fix += f": {value}, not {shown}"
    elif spec.kind is int and type(value) is float and spec.low <= value <= spec.high:
        fix += f": {round(value)}"
    elif path in (BUCKET, ALLGATHER):
        fix += "; 5e7 is usual"
    raise Refused(f'"{path}": {shown} cannot be used; {fix}')


def check_config(config, world_size):
    """Check a parsed config against the closed table: {dotted path: exact value}, with the batch
    sizes, clipping, learning rate and stage stated. Raises Refused: the key and the fix.
    """
    known = {path.rpartition(".")[2]: path for path in [*CONFIG_KEYS, *SECTIONS]}
    flat = {}
    for path, value in flatten(config).items():
        if path in SECTIONS:
            raise Refused(f'"{path}": takes a section {{...}}, not {json.dumps(value)[:60]}')
        if path not in CONFIG_KEYS:
            close = difflib.get_close_matches(path.rpartition(".")[2], known, 1, 0.75)
            raise Refused(f"{json.dumps(path[:80])} is not used by this experiment; " + (
                f'did you mean "{known[close[0]]}"?' if close else "remove it"))
        flat[path] = check_value(path, value)
    if "optimizer.type" not in flat:
        raise Refused('"optimizer" is missing; add {"type": "AdamW", "params": {"lr": 5e-5, '
                      '"torch_adam": true, "fused": true}}')
    if not flat.get("optimizer.params.torch_adam"):
        raise Refused('"optimizer.params.torch_adam": write true; without it DeepSpeed compiles an '
                      "optimizer of its own with nvcc at the first start")
    if flat.get("fp16.enabled") and flat.get("bf16.enabled"):
        raise Refused('"fp16.enabled" and "bf16.enabled" are both true; keep one')
    if flat.get(ALLGATHER, 2) % 2:
        raise Refused(f'"{ALLGATHER}": {flat[ALLGATHER]} must be even; write {flat[ALLGATHER] + 1}')
    stage = flat.setdefault(STAGE, 0)
    clipping = flat.setdefault("gradient_clipping", 1.0)  # DeepSpeed's default since 0.19; stated
    flat.setdefault("optimizer.params.lr", 1e-3)          # torch's default; stated
    offload = offloads(flat)
    if offload and not stage:
        raise Refused(f'"{ZERO}offload_optimizer" works at stages 1 and 2; set the stage')
    if not flat.get(ZERO + "compute_grad_norm", True) and (clipping or offload or not stage):
        raise Refused(f'"{ZERO}compute_grad_norm": false needs stage 1 or 2, '
                      '"gradient_clipping": 0 and no offload')
    return flat | resolve_batch(flat, world_size)


def resolve_batch(flat, ranks):
    """The three batch sizes that satisfy train = micro x accumulation x ranks, or Refused."""
    train, micro, accumulation = (flat.get(k) for k in ("train_batch_size", MICRO, ACCUMULATION))
    if train is None and micro is None:
        raise Refused(f'no batch size; add "{MICRO}"')
    if micro is None:
        micro = train // ((accumulation or 1) * ranks)
    accumulation = accumulation or (train // (micro * ranks) if train and micro else 1)
    total = micro * accumulation * ranks
    if not total or train not in (None, total):
        raise Refused(f'"train_batch_size": {train} is not {micro} per GPU x {accumulation} '
                      f"accumulation steps x {ranks} ranks = {total}; remove it and set "
                      f'"{MICRO}", which holds for any number of ranks')
    return {"train_batch_size": total, MICRO: micro, ACCUMULATION: accumulation}


def parse_sweep(text):
    """'KEY=V1,V2' to (dotted path, [(text, value), ...]). Raises Refused with did-you-mean."""
    name, _, values = text.partition("=")
    path = next((p for p in (ZERO + name, name) if p in CONFIG_KEYS), None)
    if path is None:
        close = difflib.get_close_matches(name, [p.removeprefix(ZERO) for p in CONFIG_KEYS], 1)
        raise Refused(f"--sweep {text[:80]!r}: no key {name[:60]!r}; " + (
            f"did you mean {close[0]}?" if close else "README.md has the table of keys"))
    parsed = []
    for value in re.split(r",(?![^\[]*\])", values):                # but not inside [0.9,0.99]
        try:
            parsed.append((value, json.loads(value)))
        except (ValueError, RecursionError):
            parsed.append((value, value))                         # a bare word: cpu, none
    if not all(shown for shown, _ in parsed):
        raise Refused(f"--sweep {text[:80]!r}: write KEY=V1,V2,...")
    return path, parsed


@dataclasses.dataclass
class Run:
    """One run to make: its name, the resolved config (dotted), and what a sweep set in it."""
    name: str
    config: dict
    swept: dict


def plan_runs(args, world_size):
    """Read and check every config and sweep: the list of runs, in order. Raises Refused."""
    sweeps, runs, names = dict(map(parse_sweep, args.sweep)), [], []
    if len(sweeps) < len(args.sweep):
        raise Refused("--sweep: the same key twice; give all its values in one")
    for path in args.config:
        first = len(runs)
        try:
            config = flatten(read_config(path))
            for values in itertools.product(*sweeps.values()):
                swept = dict(zip(sweeps, values))
                wanted = config | {key: value for key, (_, value) in swept.items()}
                precision = precision_of(wanted) if args.precision == "auto" else args.precision
                for key in sweeps:                    # stage 0 reads nothing else of ZeRO's section
                    if not key.endswith((".stage", ".enabled")) and (
                            key.startswith(ZERO) and not wanted.get(STAGE) or
                            key.startswith(("fp16.", "bf16.")) and not key.startswith(precision)):
                        del swept[key]
                resolved = check_config(unflatten(
                    config | {key: value for key, (_, value) in swept.items()}), world_size)
                if args.precision != "auto":
                    resolved |= {f"{p}.enabled": precision == p for p in ("fp16", "bf16")}
                name = " ".join([path.stem] + [f"{key.removeprefix(ZERO)}={shown}"
                                               for key, (shown, _) in swept.items()])
                if all(run.config != resolved for run in runs[first:]):
                    names.append(name)
                    name += f" ({names.count(name)})" * (names.count(name) > 1)
                    runs.append(Run(name, resolved, {key: resolved[key] for key in swept}))
        except Refused as error:
            raise Refused(f"--config {path}: {error}") from None
    return runs


def offloads(config):
    """Whether a resolved config keeps the optimizer on the CPU."""
    return config.get(ZERO + "offload_optimizer.device") == "cpu"


def precision_of(config):
    """'fp16', 'bf16' or 'fp32', from a resolved config."""
    return next((p for p in ("fp16", "bf16") if config.get(f"{p}.enabled")), "fp32")


# ---------------------------------------------------------------------- 4. ranks and devices

@dataclasses.dataclass
class Launch:
    """This process among the ranks, its device, and what was decided on the way (notices)."""
    rank: int
    world_size: int
    local_rank: int                        # as the launcher counts: 0 is its host's first
    device: object = None
    backend: str = None
    control: object = None                 # a gloo group: the script's own traffic, on the CPU
    shared: int = 1                        # ranks on this rank's GPU
    notices: list = dataclasses.field(default_factory=list)

    @property
    def on_gpu(self):
        return self.device.type == "cuda"

    def gather(self, value=None):
        """Every rank's value, in order of rank; all ranks call it, none goes on before the last."""
        import torch.distributed as dist
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def decide(self, chosen, function, *arguments):
        """What function returns on the chosen ranks, on every rank; one's refusal is everyone's."""
        value = error = None
        if chosen:
            try:
                value = function(*arguments)
            except Refused as refused:
                error = str(refused)
        outcomes = self.gather((chosen, value, error))
        if refusals := [error for _, _, error in outcomes if error is not None]:
            raise Refused(refusals[0])
        return [value for chosen, value, _ in outcomes if chosen]


def read_launch():
    """Rank and world size from what the launcher set, and the variables DeepSpeed wants; one
    process where none did. Raises Refused where they cannot be.
    """
    env = os.environ
    sources = [("RANK", "WORLD_SIZE", "LOCAL_RANK"),              # torchrun, deepspeed; mpirun
               ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")]
    if "MASTER_ADDR" in env:                                      # srun, told where rank 0 is
        sources.append(("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
    source = next((names for names in sources if all(name in env for name in names)), None)
    if source is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            env["MASTER_ADDR"], env["MASTER_PORT"] = "127.0.0.1", str(probe.getsockname()[1])
    texts = [env[name] for name in source] if source else ["0", "1", "0"]
    try:
        rank, world_size, local_rank = numbers = [*map(int, texts)]
        if not 0 <= rank < world_size or local_rank < 0:
            raise ValueError
    except ValueError:
        raise Refused(f"{', '.join(source)}: {', '.join(texts)!r} are not a rank, a number of "
                      "ranks above it and a local rank; unset them or use a launcher") from None
    env.update(zip(sources[0], map(str, numbers)))
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    port = env.setdefault("MASTER_PORT", "29500")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise Refused(f"MASTER_PORT: {port!r} is no port; give the launcher another --master_port")
    return Launch(*numbers)


def connect(launch, args):
    """Choose the device and join the ranks. Raises Refused where two ranks meet on one GPU."""
    import torch
    import torch.distributed as dist
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if os.environ.get("DS_ACCELERATOR", device) != device:
        raise Refused(f"DS_ACCELERATOR is {os.environ['DS_ACCELERATOR'][:60]!r}, the device here "
                      f"{device!r}; unset it")
    with contextlib.nullcontext() if args.verbose else contextlib.redirect_stdout(io.StringIO()):
        import deepspeed
        # DeepSpeed would compile a shared-memory all-reduce for CPUs at init (src: comm/torch.py).
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    launch.device, launch.backend = torch.device("cpu"), "gloo"
    if device == "cuda":
        index = launch.local_rank % torch.cuda.device_count()     # srun may show one GPU per task
        for name in {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} & {*os.environ}:
            os.environ[name] = str(index)                         # DeepSpeed asserts they agree
        launch.device, launch.backend = torch.device("cuda", index), "nccl"
        torch.cuda.set_device(launch.device)
        if args.share_gpu and nccl_version() >= (2, 30):
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        elif args.share_gpu:
            launch.backend = "gloo"
    elif args.share_gpu:
        launch.notices.append("--share-gpu: no GPU here; ranks share the CPU anyway.")
    try:
        dist.init_process_group(launch.backend, rank=launch.rank, world_size=launch.world_size,
                                timeout=COLLECTIVE_TIMEOUT)
    except (dist.DistNetworkError, ValueError) as error:
        raise RunFailed(f"MASTER_ADDR {os.environ['MASTER_ADDR']}, MASTER_PORT "
                        f"{os.environ['MASTER_PORT']} cannot be used (another launch?); give the "
                        f"launcher another --master_port: {first_line(error)}") from None
    launch.control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    if launch.on_gpu:                                             # before NCCL's first collective
        uuid = str(torch.cuda.get_device_properties(launch.device).uuid)
        devices = launch.gather((socket.gethostname(), uuid))
        launch.shared = max(map(devices.count, devices))
        if launch.shared > 1 and not args.share_gpu:
            raise Refused(f"{launch.world_size} ranks on {len(set(devices))} GPU(s): add "
                          "--share-gpu to measure memory so, or start one rank per GPU")
        if launch.shared > 1:
            launch.notices.append(
                f"{launch.world_size} ranks share {len(set(devices))} GPU(s) over {launch.backend} "
                f"(NCCL here is {'.'.join(map(str, nccl_version()))}; from 2.30 on it can): "
                "memory per rank is what separate GPUs would show, step times are not.")
    deepspeed.init_distributed(dist_backend=launch.backend, verbose=False)


def nccl_version():
    """(major, minor, patch) of the NCCL that is loaded: torch tells the one it was built with."""
    import torch
    with contextlib.suppress(OSError, AttributeError):            # linked into torch: no such file
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
        return number.value // 10_000, number.value // 100 % 100, number.value % 100
    return torch.cuda.nccl.version()


def first_line(error):
    """The first line of an exception's text and what follows its colon, or its type's name."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[:1 + lines[0].rstrip().endswith(":")])[:200]


# ------------------------------------------------------------------- 5. model and batches

def fetch(name, local=False):
    """The local folder of a Hub repository (weights, configuration, vocabulary)."""
    from huggingface_hub import snapshot_download
    return snapshot_download(name, local_files_only=local, allow_patterns=[*MODEL_FILES])


def ask_hub(name):
    """None if the Hub knows name, else why not; gives up after HUB_WAIT_SECONDS."""
    from huggingface_hub import HfApi
    answer = [f"no answer in {HUB_WAIT_SECONDS} s"]

    def ask():
        try:
            HfApi().model_info(name, timeout=HUB_WAIT_SECONDS)
            answer[0] = None
        except Exception as error:                    # whatever the client raises is the answer
            answer[0] = f"{type(error).__name__}: {first_line(error)}"
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_WAIT_SECONDS)
    return answer[0]


def has(folder, *patterns):
    return folder is not None and any(any(Path(folder).glob(name)) for name in patterns)


def find_model(args):
    """On rank 0: where weights, configuration and vocabulary come from. Raises Refused.

    Returns {"name", "folder" (None: a size known here), "hub" (whether the folder is the Hub's
    cache), "pretrained", "vocabulary" (whether the folder has it), "notice" (None or a line)}.
    """
    name = "gpt2" if args.model is None else args.model
    pretrained, why, folder = not args.random_weights, None, None
    out = "name a folder that save_pretrained wrote, or add --random-weights (which knows " \
          f"{', '.join(GPT2_SIZES)})"
    hub = args.model is None or not os.path.isdir(name)   # the default never means a folder
    if not hub:
        folder = name
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise Refused(f"--model {name}: no such folder; {out}")
    else:
        with contextlib.suppress(Exception):          # not in the cache, or not whole
            folder = fetch(name, local=True)
        wanted = pretrained or name not in GPT2_SIZES
        if wanted and name != "gpt2-tiny" and not has(folder, "model*.safetensors"):
            why = ask_hub(name)
            try:
                folder = fetch(name) if why is None else folder
            except Exception as error:                # the Hub went away, the disk is full
                why = first_line(error)
    weights = has(folder, "model*.safetensors", "pytorch_model*.bin")
    vocabulary = has(folder, "tokenizer.json", "vocab.json")
    if pretrained and not weights and args.model is not None:
        raise Refused(f"--model {name}: cannot be loaded: "
                      f"{why or 'no weights (model.safetensors) there'}; {out}")
    if pretrained and weights and not vocabulary:
        raise Refused(f"--model {name}: weights without their vocabulary (tokenizer.json): other "
                      "tokens would mean nothing to them; add it, or --random-weights")
    folder = folder if has(folder, "config.json") else None
    if folder is None and name not in GPT2_SIZES:
        raise Refused(f"--model {name}: no config.json ({why or 'none there'}); {out}")
    return {"name": name, "folder": folder, "hub": hub and folder is not None,
            "pretrained": pretrained and weights, "vocabulary": vocabulary,
            "notice": None if weights or not pretrained else
            f"gpt2 could not be fetched ({why}): RANDOM WEIGHTS instead; --model DIR for a local "
            "folder."}


@contextlib.contextmanager
def refusing(name, what=""):
    """Turn whatever a broken model folder makes transformers raise into Refused."""
    try:
        yield
    except Exception as error:
        why = "its weights have other shapes than its config.json says" if (
            "ignore_mismatched_sizes" in str(error)) else first_line(error)
        raise Refused(f"--model {name}: {what}cannot be loaded: {why}") from None


def load_config(found):
    """The model's GPT2Config, with GPT-2's activation as one kernel. Raises Refused."""
    from transformers import AutoConfig, GPT2Config
    with refusing(found["name"], "its config.json "):
        if found["folder"]:
            config = AutoConfig.from_pretrained(found["folder"], local_files_only=True)
        else:
            width, layers, heads = GPT2_SIZES[found["name"]]
            config = GPT2Config(n_embd=width, n_layer=layers, n_head=heads)
        if config.model_type != "gpt2":
            raise ValueError(f"is a {config.model_type}; this experiment trains GPT-2")
        if not config.tie_word_embeddings:
            raise ValueError("its output layer is not tied to the embedding, as GPT-2's is")
    if config.activation_function == "gelu_new":
        config.activation_function = "gelu_pytorch_tanh"          # the same function
    return config


def load_tokenizer(found):
    """The model's tokenizer; without a vocabulary GPT-2's with 256 byte tokens. Raises Refused."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import AutoTokenizer, GPT2Tokenizer
    if found["vocabulary"]:
        with refusing(found["name"], "its vocabulary "):
            tokenizer = AutoTokenizer.from_pretrained(found["folder"], local_files_only=True)
    else:
        symbols = [*sorted(ByteLevel.alphabet()), "<|endoftext|>"]
        tokenizer = GPT2Tokenizer(vocab={s: i for i, s in enumerate(symbols)}, merges=[])
    if tokenizer.eos_token_id is None:
        raise Refused(f"--model {found['name']}: its tokenizer names no end-of-text token "
                      "(eos_token)")
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(found, config, seed):
    """GPT2LMHeadModel in fp32 on the CPU, the same weights on every rank. Raises Refused."""
    import torch
    from transformers import GPT2LMHeadModel
    torch.manual_seed(seed)
    with refusing(found["name"]):
        if not found["pretrained"]:
            model = GPT2LMHeadModel(config)
        else:
            model, seen = GPT2LMHeadModel.from_pretrained(
                found["folder"], config=config, dtype=torch.float32, local_files_only=True,
                output_loading_info=True)
            extra = [k for k in seen["unexpected_keys"] if re.search(r"\bh\.\d+\..*weight$", k)]
            for keys, wrong in ((seen["missing_keys"], "are missing"), (extra, "have no place")):
                if keys:
                    raise ValueError(f"weights {wrong}, such as {sorted(keys)[0]}")
        if model.lm_head.weight is not model.transformer.wte.weight:
            raise ValueError("its output layer has weights of its own; GPT-2's are the embedding's")
        with torch.random.fork_rng([]), torch.no_grad():          # one that cannot run shows here
            model.train()(input_ids=torch.zeros(1, 2, dtype=torch.long))
        return model


def define_loss(model):
    """Wrap model so that forward(ids (B, T), labels (B, T)) is the mean next-token loss, fp32.

    Labels of -100 are left out. Pads stand right of all real tokens, so a causal model needs no
    attention mask. The output layer is padded to a multiple of 64 tokens while it is used: 50257
    is odd, and a matrix of odd width is multiplied six times slower (benchmarks/NOTES.md). The
    fp32 logits never exist whole: softmax takes 1024 positions at a time, and the gradient
    overwrites the logits.
    """
    import torch
    from torch.nn.functional import pad

    class OutputLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels):
            logits = hidden @ pad(weight, (0, 0, 0, -len(weight) % 64)).t()
            logits[:, len(weight):] = -math.inf
            kept, labels = labels != IGNORED, labels.clamp(min=0)[:, None]
            ctx.save_for_backward(hidden, weight, logits, labels, kept)
            target = torch.cat([part.log_softmax(-1, dtype=torch.float32).gather(1, label)[:, 0]
                                for part, label in zip(logits.split(1024), labels.split(1024))])
            return -(target * kept).sum() / kept.sum().clamp(min=1)

        @staticmethod
        def backward(ctx, upstream):
            hidden, weight, logits, labels, kept = ctx.saved_tensors
            scale = (upstream / kept.sum().clamp(min=1) * kept)[:, None]
            for part, label, s in zip(*(t.split(1024) for t in (logits, labels, scale))):
                gradient = part.softmax(-1, dtype=torch.float32)
                gradient.scatter_add_(1, label, torch.full_like(s, -1))
                torch.mul(gradient, s, out=part)
            hidden, weight = hidden.to(logits.dtype), weight.to(logits.dtype)     # autocast
            return (logits @ pad(weight, (0, 0, 0, -len(weight) % 64)),
                    (logits.t() @ hidden)[:len(weight)], None)

    class NextTokenLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, labels):
            hidden = self.model.transformer(input_ids=ids, use_cache=False)[0]
            return OutputLoss.apply(
                hidden[:, :-1].flatten(0, 1), self.model.lm_head.weight, labels[:, 1:].flatten())

    return NextTokenLoss()


def sentence_data(tokenizer, seq_len, count):
    """The built-in sentences, padded to seq_len: count samples, so that a step is an epoch."""
    import torch
    encoded = tokenizer(list(itertools.islice(itertools.cycle(SENTENCES), count)),
                        padding="max_length", truncation=True, max_length=seq_len,
                        padding_side="right", return_tensors="pt")
    labels = encoded.input_ids.masked_fill(encoded.attention_mask == 0, IGNORED)
    return torch.utils.data.TensorDataset(encoded.input_ids, labels)


def read_pieces(path, size=1 << 16):
    """Yield the text of a UTF-8 file in pieces of about size characters, cut before white space.

    A byte-order mark is dropped and CRLF read as LF. Raises Refused with the byte offset.
    """
    rest = ""
    with open(path, encoding="utf-8-sig") as file:
        try:
            while text := file.read(size):
                rest += text
                cut = max(rest.rfind(" "), rest.rfind("\n"))
                while cut > 0 and rest[cut - 1].isspace():        # white space stays in one piece
                    cut -= 1
                cut = len(rest) if cut <= 0 and len(rest) > 64 * size else cut  # one endless word
                if cut > 0:
                    yield rest[:cut]
                    rest = rest[cut:]
        except UnicodeDecodeError as error:           # its object ends where the file was read to
            at = file.buffer.tell() - len(error.object) + error.start
            raise Refused(f"--data {path}: not UTF-8 at byte {at}; convert it (iconv -t UTF-8)"
                          ) from None
    yield rest


def tokenize(path, tokenizer, needed):
    """Tokenize a text once into a temporary file of int32; returns its name.

    The file is one document unless it holds <|endoftext|>; one is added at the end. Memory stays
    at a few pieces. Raises Refused below needed tokens, and then leaves no file behind.
    """
    handle, name = tempfile.mkstemp(prefix="train_zero2_", suffix=".tokens")
    count, blank, pieces = 1, True, read_pieces(path)
    try:
        with os.fdopen(handle, "wb") as file:
            while batch := list(itertools.islice(pieces, 64)):
                blank = blank and not any(piece.strip() for piece in batch)
                for ids in tokenizer(batch, add_special_tokens=False, verbose=False,
                                     return_attention_mask=False).input_ids:
                    array.array("i", ids).tofile(file)
                    count += len(ids)
            array.array("i", [tokenizer.eos_token_id]).tofile(file)
        if blank or count < needed:
            raise Refused(f"--data {path}: {0 if blank else count} tokens; one block of --seq-len "
                          f"per rank and sample needs {needed}; more text, or a lower --seq-len")
    except BaseException:
        os.unlink(name)
        raise
    return name


def text_data(args, launch, tokenizer, samples):
    """Blocks of --data as (ids, ids), mapped from disk. Each host's first rank tokenizes."""
    import torch
    first, host = launch.local_rank == 0, socket.gethostname()

    def tokenize_here():
        try:
            return host, tokenize(args.data, tokenizer, samples * args.seq_len)
        except OSError as failed:
            raise Refused(f"--data {args.data}: {failed.strerror} ({failed.filename})") from None

    mine = dict(launch.decide(first, tokenize_here))[host]
    blocks = os.path.getsize(mine) // 4 // args.seq_len
    tokens = torch.from_file(mine, size=blocks * args.seq_len, dtype=torch.int32)
    launch.gather()                                               # every rank has mapped its file
    if first:
        os.unlink(mine)
    tokens = tokens.view(blocks, args.seq_len)
    return torch.utils.data.TensorDataset(tokens, tokens)


def batches(job, start=0):
    """Yield (epoch, (ids, labels)) for ever, micro-batch after micro-batch, from number start on.

    Every rank gets its own samples in the same number; the order follows from seed and epoch.
    """
    import torch
    from torch.utils.data import DataLoader, DistributedSampler
    launch, args = job.launch, job.args
    sampler = DistributedSampler(job.dataset, launch.world_size, launch.rank, seed=args.seed,
                                 shuffle=args.data is not None, drop_last=True)
    loader = DataLoader(job.dataset, job.run.config[MICRO], sampler=sampler, drop_last=True,
                        generator=torch.Generator())  # else it draws from the one of dropout
    first, skip = divmod(start, len(loader))
    for epoch in itertools.count(first):
        sampler.set_epoch(epoch)
        for batch in itertools.islice(loader, skip if epoch == first else 0, None):
            yield epoch, [tensor.long().to(launch.device) for tensor in batch]


# ------------------------------------------------------------------------------ 6. measuring

class PeakMemory:
    """Peak bytes by phase on this rank.

    On a GPU the CUDA allocator's peak, reset at the start of each phase: two calls into the
    allocator (some 20 us), no synchronisation, since allocation happens on the host. It sees what
    PyTorch allocates, not the CUDA context nor NCCL's buffers. On a CPU the process's resident
    set at the end of each phase, which keeps what was freed before.
    """

    def __init__(self, launch):
        import psutil
        import torch
        self.cuda = torch.cuda if launch.on_gpu else None
        self.process, self.device = psutil.Process(), launch.device
        self.current, self.peaks, self.reserved = "start", {}, 0

    def read(self, when="current"):
        if self.cuda is None:
            return self.process.memory_info().rss
        stats = self.cuda.memory_stats_as_nested_dict(self.device)
        if not stats:
            return 0
        self.reserved = max(self.reserved, stats["reserved_bytes"]["all"]["peak"])
        return stats["allocated_bytes"]["all"][when]

    @contextlib.contextmanager
    def phase(self, name):
        self.current = name
        if self.cuda is not None:
            self.cuda.reset_peak_memory_stats(self.device)
        yield
        self.peaks[name] = max(self.peaks.get(name, 0), self.read("peak"))

    def take(self):
        peaks, self.peaks = self.peaks, {}
        return peaks


class CollectiveCounter:
    """Counts what DeepSpeed's communication backend is asked for: number and bytes, by kind.

    It stands between deepspeed.comm and torch.distributed, reads tensor sizes only and
    synchronises nothing. Bytes are those of the whole buffer (of an all-gather the gathered one).
    Tensors of one element (overflow flag, gradient norm) count as "control". The script's own
    traffic goes past it; so does communication inside a graph compiled by DeepCompile.
    """
    KINDS = {"all_reduce": "tensor", "reduce": "tensor", "broadcast": "tensor",
             "all_gather_into_tensor": "output_tensor", "all_gather": "tensor_list",
             "reduce_scatter_tensor": "input_tensor"}

    def __init__(self):
        import deepspeed.comm.comm
        self.backend, self.counts = deepspeed.comm.comm.cdb, {}
        for kind, argument in self.KINDS.items():
            setattr(self.backend, kind, self.counted(kind, argument))

    def counted(self, kind, argument):
        call = getattr(self.backend, kind)

        def counted_call(*args, **kwargs):
            buffers = kwargs[argument] if argument in kwargs else args[0]
            buffers = buffers if isinstance(buffers, list) else [buffers]
            elements = sum(t.numel() for t in buffers)
            entry = self.counts.setdefault(kind if elements > 1 else "control",
                                           {"count": 0, "bytes": 0})
            entry["count"] += 1
            entry["bytes"] += elements * buffers[0].element_size()
            return call(*args, **kwargs)
        return counted_call

    def take(self):
        counts, self.counts = self.counts, {}
        return counts

    def close(self):
        for kind in self.KINDS:
            delattr(self.backend, kind)                     # the class's method shows again


def device_used(launch):
    """Bytes that nvidia-smi shows for this process, or None where the driver does not tell."""
    with contextlib.suppress(Exception):                     # no NVML, or hidden by a container
        import pynvml
        import torch
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(launch.device).uuid}"
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(
            pynvml.nvmlDeviceGetHandleByUUID(uuid))
        mine = [p for p in processes if p.pid == os.getpid()]
        return (mine or (processes if len(processes) == 1 else []))[0].usedGpuMemory
    return None


def prepare_device(launch):
    """Allocate cuBLAS's workspaces in both threads that use it, so that they are in every floor."""
    import torch
    if launch.on_gpu:
        x = torch.ones(64, 64, device=launch.device, dtype=torch.half, requires_grad=True)
        torch.addmm(x[0], x, x).sum().backward()
        synchronize(launch)


def synchronize(launch):
    """Wait for the GPU, so that the clock starts and stops on an idle device."""
    import torch
    if launch.on_gpu:
        torch.cuda.synchronize(launch.device)


# ------------------------------------------------------------------------------- 7. one run

class StopRequest:
    """Turns SIGINT or SIGTERM into a request that all ranks honour after a step.

    Before the first step, and at a second SIGINT, it ends the process. A SIGTERM behind a SIGINT
    and a SIGINT right behind one do not: launchers send them when a terminal has sent its own.
    """

    def __init__(self):
        self.signal, self.training = 0, False
        pipe, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)
        threading.Thread(target=self.watch, args=(pipe,), daemon=True).start()

    def receive(self, number, frame):
        if not self.signal and not self.training:
            raise KeyboardInterrupt
        self.signal = self.signal or number

    def watch(self, pipe):
        """End the process where receive cannot: the main thread may wait for another rank."""
        first = None
        while True:
            number, now = os.read(pipe, 1)[0], time.monotonic()
            again = first is not None and number == signal.SIGINT and now > first + 1
            if again or (first is None and not self.training):
                time.sleep(0 if again else 2 * REFUSAL_DELAY_SECONDS)       # receive comes first
                if os.environ.get("RANK", "0") == "0":
                    os.write(2, b"train_zero2: interrupted\n")
                os._exit(130)
            first = first or now


@dataclasses.dataclass
class Job:
    """One run to make and all it needs."""
    run: Run
    args: argparse.Namespace
    launch: Launch
    model: object                          # fp32, on the CPU; every run trains a copy
    tokenizer: object
    dataset: object
    stop: StopRequest


def repair_baseline(engine, config):
    """Make stage 0 train as stages 1 and 2 do; returns the repairs made, one line each.

    1. DeepSpeed's stage-0 fp16 and bf16 wrapper calls step() on zero gradients when it is built
       (src: FP16_UnfusedOptimizer.initialize_optimizer_states): Adam's bias correction is one step
       ahead and the masters are decayed once. Seen in the state's step count; undone by clearing
       the state and copying the weights back into the masters.
    2. At stage 0, fp16, engine.backward does not scale the loss, but step() unscales the gradient.
       Seen by the gradient of a loss of 1; repaired in train_step, which scales the loss.
    """
    import torch
    if config[STAGE] or precision_of(config) == "fp32":
        return []
    repairs, inner = [], engine.optimizer.optimizer
    if any(float(state.get("step", 0)) > 0 for state in inner.state.values()):
        inner.state.clear()
        engine.optimizer.refresh_fp32_params()
        repairs.append("optimizer state: one step had been taken at construction; cleared")
    if precision_of(config) == "fp16":
        x = torch.zeros((), device=engine.device, requires_grad=True)
        engine.backward(x * 1.0)
        unscaled = float(x.grad) * config[ACCUMULATION] == 1
        engine.zero_grad()
        if unscaled and engine.optimizer.loss_scale != 1:
            repairs.append("loss scale: backward() did not apply it; applied by this script")
    return repairs


def train_step(engine, micro_batches, memory, repairs):
    """One optimizer step over [(ids, labels), ...]; returns their losses, tensors of no shape."""
    scale_loss, losses = any(repair.startswith("loss scale") for repair in repairs), []
    for ids, labels in micro_batches:
        with memory.phase("forward"):
            loss = engine(ids, labels)
        losses.append(loss.detach())
        with memory.phase("backward"):
            engine.backward(loss * engine.optimizer.loss_scale if scale_loss else loss)
        del loss
        with memory.phase("step"):
            engine.step()
    return losses


def build_engine(run, launch, model, args, memory):
    """deepspeed.initialize on a copy of model; returns the engine and the repairs made."""
    import deepspeed
    import torch
    import torch.distributed as dist
    with memory.phase("init"):
        module = define_loss(copy.deepcopy(model))
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()),
            config=unflatten(run.config | {"steps_per_print": 10 ** 9}))
    for group in dist.distributed_c10d._world.pg_map:         # DeepSpeed leaves its own at 30 min
        dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT, group)
    if args.compile:
        try:
            engine.compile()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:                            # DeepCompile's own build, with nvcc
            raise RunFailed(f"--compile: cannot build: {first_line(error)}") from None
    repairs = repair_baseline(engine, run.config)
    torch.manual_seed(args.seed + 1 + launch.rank)            # dropout; the same in every run
    return engine, repairs


def execute(record, job, on_step):
    """Make one run and fill its record (keys: README.md), whole on rank 0.

    Raises RunFailed for what a user can mend (out of memory, loss not finite). The engine is gone
    when it returns or raises; what stays allocated shows in the next run's floor_bytes.
    """
    import torch
    args, launch = job.args, job.launch
    gc.collect()
    if launch.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(launch.device)
    memory, engine, counter = PeakMemory(launch), None, None
    record["floor_bytes"] = memory.read()
    try:
        check_fits(record, job.run, launch, job.model)
        engine, record["repairs"] = build_engine(job.run, launch, job.model, args, memory)
        counter = CollectiveCounter()
        whole = measure(record, job, engine, memory, counter, on_step)
        if args.save:
            record["saved"] = save_weights(job, engine) if whole else None
        if args.memory_snapshot and launch.on_gpu and whole:
            save_snapshot(record, job, engine, memory)
    except torch.OutOfMemoryError as error:
        asked = ". ".join(first_line(error).split(". ")[:3])      # for what, of what, what is free
        raise RunFailed(f"rank {launch.rank}, {memory.current}: {asked}. What helps: a "
                        f'smaller "{MICRO}", --seq-len or "{BUCKET}", or "offload_optimizer"'
                        ) from None
    except Exception as error:
        if "DefaultCPUAllocator" in str(error):
            raise RunFailed(f"rank {launch.rank}, {memory.current}: out of memory on the CPU: "
                            f"{first_line(error)[-80:]}") from None
        if "scale already at minimum" in str(error):              # DeepSpeed's loss scaler
            raise RunFailed("the loss scale is at its floor and gradients still overflow: a lower "
                            "learning rate or bf16 helps") from None
        if not args.compile or not type(error).__module__.startswith("torch._"):
            raise
        raise RunFailed(f"--compile: cannot build: {first_line(error)}") from None
    finally:
        if counter:
            counter.close()
        if engine:
            engine.destroy()
        if engine and args.compile:
            for weight in engine.module.parameters():         # one is kept alive, and so are all
                weight.untyped_storage().resize_(0)
            torch.compiler.reset()                            # else the ninth run is not compiled
        del engine
        gc.collect()


def check_fits(record, run, launch, model):
    """Fail before anything is built where the GPU cannot hold even what is expected."""
    import torch
    record.update(expectations([p.numel() for p in model.parameters()], run.config,
                               launch.world_size, launch.backend == "gloo"))
    need = record["floor_bytes"] + peak_of(record["expected_bytes"])
    if launch.on_gpu:
        total = torch.cuda.get_device_properties(launch.device).total_memory
        if need * launch.shared > total:
            raise RunFailed(f"{launch.shared} rank(s) on one GPU need {need / GB:.1f} GB each and "
                            f"activations; it has {total / GB:.1f} GB")


def timed_step(engine, micro_batches, launch, memory, repairs, signal_number=0):
    """One optimizer step between two readings of the clock on an idle device, as all ranks saw it.

    Returns a float64 tensor (ranks, 3): mean loss, seconds, signal (all ranks stop after the same
    step). The exchange is not timed: the script's own traffic, once a step, on the CPU.
    """
    import torch
    import torch.distributed as dist
    synchronize(launch)
    begin = time.perf_counter()
    losses = train_step(engine, micro_batches, memory, repairs)
    synchronize(launch)
    seconds = time.perf_counter() - begin
    own = torch.tensor([statistics.fmean(map(float, losses)), seconds, signal_number],
                       dtype=torch.float64)
    everyone = torch.empty(launch.world_size, 3, dtype=torch.float64)
    dist.all_gather_into_tensor(everyone.view(-1), own, group=launch.control)
    return everyone


def measure(record, job, engine, memory, counter, on_step):
    """Train until --steps, filling record: steps, peaks by phase and rank, collectives.

    Returns whether it got there: False where a signal stopped it, on all ranks alike.
    """
    args, launch, config = job.args, job.launch, job.run.config
    done = load_checkpoint(job, engine) if args.resume else 0
    feed = batches(job, done * config[ACCUMULATION])
    scaled, started = precision_of(config) == "fp16", False
    overall, steady, resident, collectives = memory.take(), {}, None, {}
    record["resumed_from_step"] = done if args.resume else None
    job.stop.training = True
    for step in range(done + 1, args.steps + 1):
        taken = list(itertools.islice(feed, config[ACCUMULATION]))
        scale = engine.optimizer.loss_scale if scaled else None
        everyone = timed_step(engine, [batch for _, batch in taken], launch, memory,
                              record["repairs"], job.stop.signal)
        mean, applied = everyone[:, 0].mean().item(), bool(engine.was_step_applied())
        peaks, counts = memory.take(), counter.take()
        warmup = step - done <= WARMUP_STEPS or not started
        started |= applied                                    # Adam's state comes with the first
        for phase, peak in peaks.items():
            overall[phase] = max(overall.get(phase, 0), peak)
            if applied and not warmup:
                steady[phase] = max(steady.get(phase, 0), peak)
        if applied and not warmup:
            collectives, resident = counts, max(resident or 0, memory.read())
        record["steps"].append({
            "step": step, "loss": mean if math.isfinite(mean) else None,
            "seconds": everyone[:, 1].max().item(), "applied": applied, "loss_scale": scale,
            "warmup": warmup, "epoch": taken[-1][0]})
        on_step(record, max(overall.values()))
        stopped = bool(everyone[:, 2].any())
        if args.checkpoint and (stopped or step == args.steps or (
                args.checkpoint_every and step % args.checkpoint_every == 0)):
            save_checkpoint(job, engine, step)
            counter.take()                                    # DeepSpeed compares the tag's digest
        if stopped:
            break
        if not scaled and not math.isfinite(mean):
            raise RunFailed(f"step {step}: the loss is not finite" + (
                "; a lower learning rate helps" if step > done + 1 else
                " before any update: look at the weights it starts from"))
    pads = statistics.mean((labels == IGNORED).float().mean().item() for _, (_, labels) in taken)
    rows = launch.gather({
        **{phase: steady.get(phase) for phase in PHASES[1:]}, "init": overall["init"],
        "steady": max(steady.values(), default=None), "overall": max(overall.values()),
        "resident": resident, "reserved": memory.reserved or memory.read(),
        "device_used": device_used(launch) if launch.on_gpu else None, "padding": pads})
    record.update(summarize(record["steps"], rows, config, args.seq_len), interrupted=stopped,
                  collectives=None if config.get("compile.deepcompile") else collectives)
    return not stopped


def summarize(steps, rows, config, seq_len):
    """The record's figures from its steps and the ranks' rows: medians, peaks of the worst rank."""
    def worst(key):
        return max((row[key] for row in rows if row[key] is not None), default=None)

    seconds = [s["seconds"] for s in steps if s["applied"] and not s["warmup"]]
    median = statistics.median(seconds) if seconds else None
    quarters = statistics.quantiles(seconds, n=4, method="inclusive") if len(
        seconds) > 1 else [0, 0, 0]
    tokens = config["train_batch_size"] * seq_len
    return {
        "skipped_steps": sum(not s["applied"] for s in steps), "median_step_seconds": median,
        "step_seconds_iqr": quarters[2] - quarters[0], "tokens_seen": tokens * steps[-1]["step"],
        "tokens_per_second": tokens / median if median else None,
        "padding_share": statistics.mean(row["padding"] for row in rows),
        "peak_allocated_bytes": {key: worst(key) for key in (*PHASES, "steady", "overall")},
        "worst_rank": max(range(len(rows)), key=lambda r: (
            rows[r]["steady"] or 0, rows[r]["overall"], -r)),
        "peak_allocated_bytes_per_rank": rows, "resident_bytes": worst("resident"),
        "peak_reserved_bytes": worst("reserved"), "device_used_bytes": worst("device_used")}


def save_snapshot(record, job, engine, memory):
    """Write the allocator's history of one more step than was measured, for memory_viz."""
    import torch
    taken = list(itertools.islice(batches(job), job.run.config[ACCUMULATION]))
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    train_step(engine, [batch for _, batch in taken], memory, record["repairs"])
    path, name = job.args.memory_snapshot, re.sub(r"[^\w.=-]+", "_", job.run.name)
    torch.cuda.memory._dump_snapshot(str(path.with_name(
        f"{path.stem}.{name}.rank{job.launch.rank}{path.suffix or '.pickle'}")))
    torch.cuda.memory._record_memory_history(enabled=None)


def identity(run, args, world_size):
    """What a checkpoint and the run that goes on from it must have in common."""
    held = {key: value for key, value in run.config.items() if not key.endswith(".enabled")
            and key.startswith(("train_batch", "gradient_", "optimizer.", "fp16.", "bf16."))}
    data = None
    if args.data:
        with open(args.data, "rb") as file:
            start = zlib.crc32(file.read(1 << 20))
        data = f"{args.data.stat().st_size} bytes, starting with {start:08x}"
    model = os.path.realpath(args.model) if args.model and os.path.isdir(args.model) else (
        args.model or "gpt2")
    return {"world_size": world_size, "stage": run.config[STAGE], "model": model,
            "seq_len": args.seq_len, "seed": args.seed, "data": data, "round_robin_gradients":
            run.config.get(ZERO + "round_robin_gradients", False)} | held


def last_checkpoint(folder):
    """(tag, what save_checkpoint wrote beside it) of the checkpoint that `latest` names."""
    tag = (folder / "latest").read_text().strip()
    return tag, json.loads((folder / tag / "train_zero2.json").read_text())


def check_resume(run, args, world_size):
    """Refuse to resume where there is nothing, or something else; needs no torch."""
    now = identity(run, args, world_size)
    try:
        tag, saved = last_checkpoint(args.checkpoint)
        always = {"precision", *(key for key in now if key not in run.config)}
        if type(saved["step"]) is not int or not always <= {*saved}:
            raise ValueError
    except (OSError, ValueError, TypeError, KeyError):
        raise Refused(f"--resume: no whole checkpoint in {args.checkpoint}; start without "
                      "--resume, in a new folder") from None
    folder, universal = args.checkpoint / tag, run.config.get("checkpoint.load_universal")
    converted = Path(f"{folder}_universal").is_dir()
    if any(saved[key] != now[key] for key in ("world_size", "stage")):
        if not (universal and converted):
            raise Refused(
                f"--resume: {folder} holds {saved['world_size']} ranks at stage {saved['stage']}, "
                f"this is {world_size} at {now['stage']}; convert it: (1) python -m deepspeed."
                f"checkpoint.ds_to_universal --inject_missing_state --input_folder {folder} "
                f'--output_folder {folder}_universal (2) add "checkpoint": {{"load_universal": '
                "true} to the JSON")
    elif universal and not converted:                         # a run that was converted went on
        raise Refused(f"--resume: {folder} has these ranks and this stage and is not converted; "
                      'remove "checkpoint.load_universal"')
    free = ["step", "precision"] + ["world_size", "stage", "train_batch_size", ACCUMULATION,
                                    "round_robin_gradients"] * bool(universal)
    for key in now | saved:
        if key not in free and saved.get(key) != now.get(key):
            raise Refused(f"--resume: the checkpoint has {key} {saved.get(key)}, this run "
                          f"{now.get(key)}; go on with the checkpoint's")
    if saved["step"] >= args.steps:
        raise Refused(f"--resume: the checkpoint is at step {saved['step']} already; --steps "
                      f"{args.steps} is the total of the whole run")


def save_checkpoint(job, engine, step):
    """Write a whole checkpoint, then point `latest` at it, then drop the one before.

    DeepSpeed's own `latest` is written before the other ranks' parts are on disk. Here a kill at
    any moment leaves `latest` on a whole checkpoint.
    """
    import torch
    tag, folder, launch = f"step{step}", job.args.checkpoint, job.launch
    try:
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
        state = {"cpu": torch.get_rng_state()}
        if launch.on_gpu:
            state["cuda"] = torch.cuda.get_rng_state(launch.device)
        torch.save(state, folder / tag / f"random_rank{launch.rank}.pt")
        launch.gather()                                       # every rank's part is on disk
        if launch.rank == 0:
            saved = identity(job.run, job.args, launch.world_size) | {
                "step": step, "precision": precision_of(job.run.config)}
            (folder / tag / "train_zero2.json").write_text(json.dumps(saved))
            replace_file(folder / "latest", tag.encode())
            for old in folder.glob("step*"):
                if old.name != tag and (old / "train_zero2.json").exists():
                    shutil.rmtree(old)
        launch.gather()
    except (OSError, RuntimeError) as error:
        raise RunFailed(f"checkpoint of step {step} in {folder}: {first_line(error)}" + (
            "; the one before it is whole" if (folder / "latest").exists() else "")) from None


def load_checkpoint(job, engine):
    """Load what `latest` names into the engine; returns the number of steps done."""
    import torch
    folder, launch = job.args.checkpoint, job.launch
    tag, saved = last_checkpoint(folder)
    universal = engine.load_universal_checkpoint()
    name, random = tag + "_universal" * universal, folder / tag / f"random_rank{launch.rank}.pt"
    try:
        path, _ = engine.load_checkpoint(str(folder), tag=name)
        known = random.exists() or not universal              # another number of ranks has fewer
        state = torch.load(random, weights_only=True) if known else None
    except Exception as error:                                    # whatever damage makes it raise
        raise RunFailed(f"--resume: {folder / name} cannot be loaded: {first_line(error)}"
                        ) from None
    if path is None:
        raise RunFailed(f"--resume: {folder / name} cannot be loaded")
    if state:
        torch.set_rng_state(state["cpu"])
        if launch.on_gpu and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], launch.device)
    return saved["step"]


def save_weights(job, engine):
    """Write fp32 master weights and tokenizer for from_pretrained; whole, or not at all. Returns
    {"path", "eval_loss"}: of rank 0's first micro-batch, which the weights must give when reloaded.
    """
    import torch
    from deepspeed.utils import safe_get_full_fp32_param
    masters = {id(p): p for p in engine.module.parameters()}      # fp32, stage 0: the weights
    if job.run.config[STAGE]:
        masters = {key: safe_get_full_fp32_param(p) for key, p in masters.items()}
    elif precision_of(job.run.config) != "fp32":
        pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups)
        masters = {id(p): q for halves, fulls in pairs for p, q in zip(halves, fulls)}
    engine.eval()
    with torch.no_grad():
        loss = float(engine(*next(batches(job))[1]))
    engine.train()
    if job.launch.rank == 0:
        clone = copy.deepcopy(job.model)
        clone.load_state_dict({name.removeprefix("model."): masters[id(p)].detach().float().cpu()
                               for name, p in engine.module.named_parameters()},
                              strict=False)                       # lm_head is tied to wte
        target = Path(os.path.realpath(job.args.save))
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=target.name[:99] + ".", dir=target.parent)
        try:
            clone.save_pretrained(folder)
            job.tokenizer.save_pretrained(folder)
            os.chmod(folder, 0o755)
            os.replace(folder, target)
        except Exception as error:                                # safetensors has its own
            shutil.rmtree(folder, ignore_errors=True)
            raise RunFailed(f"--save {job.args.save}: {first_line(error)}") from None
    return {"path": str(job.args.save), "eval_loss": loss}


# --------------------------------------------------------------------------- 8. several runs

def gpt2_parameters(name):
    """Elements of each parameter of a GPT-2 size, in the order of model.parameters()."""
    width, layers, _ = GPT2_SIZES[name]
    block = [width, width, 3 * width ** 2, 3 * width, width ** 2, width, width, width,
             4 * width ** 2, 4 * width, 4 * width ** 2, width]
    return [50257 * width, 1024 * width, *block * layers, width, width]


def partition(sizes, config, ranks):
    """How stages 1 and 2 lay parameters over ranks (src: stage_1_and_2.py, __init__).

    Returns (elements of one rank's partition, [{rank: elements on it}] per parameter); the total
    is padded to a multiple of 2 x ranks.
    """
    order = list(range(len(sizes)))
    if config.get(ZERO + "round_robin_gradients"):
        order = [i for r in range(ranks) for i in order[r::ranks]]
    size, start, owners = 2 * math.ceil(sum(sizes) / (2 * ranks)), 0, [None] * len(sizes)
    for i in order:
        end = start + sizes[i]
        owners[i] = {r: min(end, (r + 1) * size) - max(start, r * size)
                     for r in range(start // size, (end - 1) // size + 1)}
        start = end
    return size, owners


def expected_bytes(sizes, config, ranks, rank, gloo=False):
    """Bytes that one rank allocates, derived from the config; activations and logits left out.

    Args: sizes (elements per parameter, tied weights once, the token embedding first), config
    (dotted), ranks, rank, gloo (its all-gather makes a copy on the GPU). Returns {"resident",
    "gradients", "buckets", "backward", "step"}: states between steps; gradients held to the step;
    reduction buffers; the two phases' peaks.
    Source: stage_1_and_2.py (setup_buckets, get_grad_norm_direct, step), unfused_optimizer.py.
    """
    low, total, embedding = precision_of(config) != "fp32", sum(sizes), sizes[0]
    b = 2 if low else 4                                           # bytes of a weight, a gradient
    unfused = 0 if config.get("optimizer.params.fused") else 4    # AdamW's square root, in fp32
    if config[STAGE] == 0:
        resident, gradients = (b + (12 if low else 8)) * total, b * total
        flat = b * stage0_flat(sizes)
        return {"resident": resident, "gradients": gradients, "buckets": flat,
                "backward": resident + gradients + max(flat, 2 * embedding * b),
                "step": resident + gradients + ((4 if low else 0) + unfused) * total}
    size, owners = partition(sizes, config, ranks)
    mine = [owner.get(rank, 0) for owner in owners]
    offload = offloads(config)
    gradients = 0 if offload else b * sum(n for n, m in zip(sizes, mine) if m)
    resident = b * size * ranks + (b * max(sizes) if offload else 12 * size)
    buffers = b * config.get(BUCKET, 500_000_000) * config.get(ZERO + "contiguous_gradients", 1)
    buffers *= 2 if config.get(ZERO + "overlap_comm") else 1
    norm = 8 * max(mine) * config.get(ZERO + "compute_grad_norm", 1)            # in float64
    backward = reduction_peak(sizes, owners, rank, config, b, gradients)
    if offload:                                       # the norm is taken as gradients leave
        alone = embedding * b if embedding > config.get(BUCKET, 500_000_000) else 0
        backward, step = max(backward, alone + norm), 0
    else:
        step = gradients + max(norm, size * ((b + 4 if low else b) + unfused))
    return {"resident": resident, "gradients": gradients, "buckets": buffers,
            "backward": resident + buffers + backward,
            "step": resident + max(step, b * size * ranks * gloo)}


def stage0_flat(sizes):
    """Elements of the largest flat copy that stage 0 reduces (src: engine.allreduce_no_retain)."""
    largest = flat = 0
    for n in sizes:
        flat = n if flat > STAGE0_BUCKET else flat + n
        largest = max(largest, flat)
    return largest


def reduction_peak(sizes, owners, rank, config, b, held):
    """Most bytes of gradients and flat copies alive at once in a ZeRO backward, buffers apart.

    Follows reduce_independent_p_g_buckets_and_remove_grads: gradients come last parameter first;
    each is copied into the bucket and freed (a larger one stays and is reduced in place); a full
    bucket is reduced, through a flat copy where it belongs to several ranks; a rank's own
    gradients move to a buffer of held bytes, allocated with the first of them. Without
    contiguous_gradients there is no bucket to copy into: gradients stay, always through a flat
    copy. The tied embedding's gradient is alive from the start (lm_head's part), three times while
    the lookup's part is added. At stage 1 without overlap_comm all wait for the end, then go first
    parameter first.
    """
    bucket, embedding = config.get(BUCKET, 500_000_000), sizes[0] * b
    late = config[STAGE] == 1 and not config.get(ZERO + "overlap_comm")
    live, peak = (sum(sizes) * b, (sum(sizes) + 2 * sizes[0]) * b) if late else (embedding, 0)
    held *= 1 if late else min(2, config[ACCUMULATION])
    copied = config.get(ZERO + "contiguous_gradients", True)
    scattered = config.get(ZERO + "reduce_scatter", True)
    filled, reducing, waiting, owned = 0, set(), 0, False

    def reduce_bucket():
        nonlocal live, peak, filled, waiting, owned
        flat = filled * b if (len(reducing) > 1 and scattered) or not copied else 0
        peak = max(peak, live + flat)
        if rank in reducing and not owned and copied:
            live, owned = live + held, True
            peak = max(peak, live)
        live -= waiting if config[STAGE] == 2 or rank in reducing else 0
        filled = waiting = 0
        reducing.clear()

    for i in range(len(sizes)) if late else reversed(range(len(sizes))):
        gradient = sizes[i] * b
        if not late:
            live += gradient if i else 0
            peak = max(peak, live if i else live + 2 * embedding)
        if filled and filled + sizes[i] > bucket:
            reduce_bucket()
        if not copied:
            waiting += 0 if rank in owners[i] else gradient       # a rank's own stay where they are
        elif sizes[i] > bucket:
            waiting = gradient
        else:
            live -= gradient
        filled += sizes[i]
        reducing.update(owners[i])
    reduce_bucket()
    return peak


def expectations(sizes, config, ranks, gloo=False):
    """expected_bytes of every rank, and of the worst by figure."""
    every = [expected_bytes(sizes, config, ranks, rank, gloo) for rank in range(ranks)]
    return {"expected_bytes": {key: max(e[key] for e in every) for key in every[0]},
            "expected_bytes_per_rank": every}


def peak_of(expected):
    return max(expected["backward"], expected["step"])


def foresee(runs, sizes, ranks, on_gpu):
    """Lines to say before the first run: where ZeRO cannot help, as far as the model tells."""
    notes = ["one rank: nothing is partitioned, stages 1 and 2 only add buffers."] if (
        ranks == 1 and any(run.config[STAGE] and not offloads(run.config) for run in runs)) else []
    for run in runs if ranks > 1 and on_gpu else []:
        zero, plain = (peak_of(expectations(sizes, config, ranks)["expected_bytes"])
                       for config in (run.config, run.config | {
                           STAGE: 0, ZERO + "offload_optimizer.device": "none"}))
        if run.config[STAGE] and zero >= plain:
            notes.append(f"{run.name}: its buckets take more than it saves: {zero / MB:,.0f} MB "
                         f"expected, {plain / MB:,.0f} at stage 0; a smaller reduce_bucket_size "
                         "helps.")
    return notes


def outside_zero(run):
    """The part of a run's config that decides how it trains: not zero_optimization, nor compile."""
    return {k: v for k, v in flatten(run["config"]).items()
            if not k.startswith((ZERO, "compile."))}


def stage_of(run):
    return run["config"]["zero_optimization"]["stage"]


def reductions(run):
    """Gradient reductions of one step, control traffic left out; None where not counted."""
    return None if run["collectives"] is None else sum(
        run["collectives"].get(kind, {}).get("count", 0)
        for kind in ("all_reduce", "reduce", "reduce_scatter_tensor"))


def time_noise(*runs):
    """Seconds under which two medians count as equal."""
    return max(max(TIME_NOISE * r["median_step_seconds"], r["step_seconds_iqr"]) for r in runs)


def timed_steps(run):
    return sum(s["applied"] and not s["warmup"] for s in run["steps"])


def same_peak(a, b):
    return abs(a - b) <= MEMORY_NOISE * max(a, b)


def same_time(a, b):
    return abs(a["median_step_seconds"] - b["median_step_seconds"]) <= time_noise(a, b)


def memory_unknown(environment):
    return "" if environment["memory_kind"] == "cuda_allocator" else (
        "no GPU: the resident set keeps what earlier runs freed")


def compare(runs, environment):
    """The verdicts over a launch's records: [{"name", "outcome", "detail"}, ...]; pure."""
    whole = [run for run in runs if not run["error"]]
    steady = [run for run in whole if run["median_step_seconds"]]
    found = {"loss_falls": loss_falls(whole, environment),
             "loss_agrees": loss_agrees(whole),
             "memory_saved": memory_saved(steady, environment),
             "bucket_effect": bucket_effect(steady, environment),
             "knob_without_effect": knob_without_effect(steady, environment)}
    return [{"name": name, "outcome": outcome, "detail": detail}
            for name, (outcome, detail) in found.items()]


def worst_outcome(outcomes, absent):
    """FAIL before NOT APPLICABLE before PASS; absent where there is none."""
    return next((o for o in ("FAIL", NA, "PASS") if o in outcomes), absent)


def together(details):
    """One line of [(outcome, name, text)]: what is alike is said once."""
    texts = {}
    for outcome, name, text in details:
        texts.setdefault((outcome, text if outcome != "PASS" else ""), []).append((name, text))
    return "; ".join(f"{same[0][0]}: {same[0][1]}" + (
        f" (and {len(same) - 1} more likewise)" if len(same) > 1 else "")
        for same in texts.values())


def loss_falls(runs, environment):
    """On every run: finite, and the fourth applied step's loss below the first's."""
    details = []
    for run in runs:
        losses = [s["loss"] for s in run["steps"] if s["applied"]]
        tenth = math.ceil(len(losses) / 10) if environment["data"] else 1
        if not losses:
            outcome, text = "FAIL", f"all {len(run['steps'])} steps were skipped: overflow at a " \
                f"loss scale of {run['steps'][-1]['loss_scale']:g}, a lower one helps"
        elif None in losses:
            outcome, text = "FAIL", "a loss is not finite"
        elif len(losses) < 2 or run["resumed_from_step"] or (environment["data"] and tenth < 3):
            outcome, text = NA, "resumed" if run["resumed_from_step"] else "too few applied steps"
        else:
            last = losses[-tenth:] if environment["data"] else losses[:4][-1:]
            first, last = statistics.mean(losses[:tenth]), statistics.mean(last)
            outcome = "PASS" if last < first else "FAIL"
            text = f"{first:.4f} to {last:.4f} " + (
                f"(means of {tenth})" if environment["data"] else f"in {len(losses[:4]) - 1} steps")
        details.append((outcome, run["name"], text))
    return worst_outcome([o for o, _, _ in details], "FAIL"), together(details) or "no run finished"


def loss_gaps(run, first):
    """How far run's losses are from first's, step by step, up to where one alone skips a step.

    Returns (largest relative difference of the first LOSS_STEPS, largest later one as a share of
    the first loss, number of steps compared, the step that one alone skipped, the step at which
    one alone is not finite: None where there is none).
    """
    pairs = list(zip(run["steps"], first["steps"]))
    skip = next((a["step"] for a, b in pairs if a["applied"] != b["applied"]), None)
    alone = next((a["step"] for a, b in pairs if (a["loss"] is None) != (b["loss"] is None)), None)
    gaps = [(abs(a["loss"] - b["loss"]), abs(b["loss"])) for a, b in pairs
            if a["loss"] is not None and b["loss"] and (skip is None or a["step"] <= skip)]
    return (max((gap / loss for gap, loss in gaps[:LOSS_STEPS]), default=0),
            max((gap / gaps[0][1] for gap, _ in gaps[LOSS_STEPS:]), default=0),
            len(gaps), skip, alone)


def loss_agrees(runs):
    """Every run's losses equal the first's step by step, up to where one alone skips a step."""
    found = {}
    for run in runs[1:]:
        ours, theirs = outside_zero(run), outside_zero(runs[0])
        other = next((k for k in {**ours, **theirs} if ours.get(k) != theirs.get(k)), None)
        early, late, steps, skip, alone = loss_gaps(run, runs[0])
        if other:
            outcome, text = NA, f"trains otherwise: {other}"
        elif alone:
            outcome, text = "FAIL", f"only one of them is not finite at step {alone}"
        elif not any(s["applied"] for s in run["steps"][:min(steps, LOSS_STEPS)][:-1]):
            outcome, text = NA, "no loss after an applied step to compare"
        else:
            outcome = "FAIL" if early > LOSS_TOLERANCE or late > LOSS_DRIFT else (
                NA if skip else "PASS")
            text = (f"within {early:.0e} over {min(steps, LOSS_STEPS)} steps (tolerance "
                    f"{LOSS_TOLERANCE:g})"
                    + f", then {late:.0e} of the first loss (tolerance {LOSS_DRIFT:g})" * (
                        steps > LOSS_STEPS)
                    + f", one alone skipped step {skip}: nothing to compare from there" * bool(skip)
                    )
        found[outcome, run["name"], text] = max(early / LOSS_TOLERANCE, late / LOSS_DRIFT)
    details = sorted(found, key=found.get, reverse=True)      # the nearest to failing is named
    return worst_outcome([o for o, _, _ in details], NA), (
        f"against {runs[0]['name']}: {together(details)}" if details else "needs two whole runs")


def memory_saved(runs, environment):
    """Each stage 2's peak below stage 0's, expected beside measured, by optimizer and gradients."""
    def find(stage, zero):                            # what differs from zero in the stage alone
        return next((run for run in runs if stage_of(run) == stage
                     and outside_zero(run) == outside_zero(zero) and (not stage or {
                         **flatten(run["config"]), STAGE: 2} == flatten(zero["config"]))), None)

    pairs = [(find(0, run), find(1, run), run) for run in runs if stage_of(run) == 2
             and not offloads(flatten(run["config"])) and find(0, run)]
    reason = memory_unknown(environment) or (
        "one rank: nothing is partitioned" if environment["world_size"] == 1 else
        "" if pairs else "needs a run at stage 0 and one at stage 2 that train alike, without "
        "offload")
    if reason:
        return NA, reason
    outcomes, texts = [], []
    for baseline, middle, run in pairs:
        plain, zero = (r["peak_allocated_bytes"]["steady"] for r in (baseline, run))
        model = [r["floor_bytes"] + peak_of(r["expected_bytes"]) for r in (baseline, run)]
        text = (f"stage 0 {plain / MB:,.0f} MB, stage 2 {zero / MB:,.0f} MB: "
                f"{zero / plain - 1:+.1%} (expected without activations {model[0] / MB:,.0f} and "
                f"{model[1] / MB:,.0f}: {model[1] / model[0] - 1:+.1%})")
        if middle:
            optimizer = middle["peak_allocated_bytes"]["steady"]
            text += (f", optimizer states (0 to 1) {(plain - optimizer) / MB:,.0f} MB, gradients "
                     f"(1 to 2) {(optimizer - zero) / MB:,.0f} MB"
                     + ", stage 2 adds nothing to stage 1 here" * same_peak(optimizer, zero))
        alike = same_peak(plain, zero)
        outcomes.append(NA if alike else "PASS" if zero < plain else "FAIL")
        texts.append(f"{run['name']}: " * (len(pairs) > 1) + text
                     + ", within the noise" * alike)
    return next(o for o in ("FAIL", "PASS", NA) if o in outcomes), "; ".join(texts)


def groups_by(runs, key):
    """Lists of (value, run) whose runs differ in key alone, two values or more, sorted by it."""
    groups = {}
    for run in runs:
        flat = flatten(run["config"])
        value = flat.pop(key, None)
        flat.pop("train_batch_size", None)                        # follows from the other two
        if value is not None:
            groups.setdefault(json.dumps(flat, sort_keys=True), []).append((value, run))
    return [sorted(group, key=lambda pair: pair[0]) for group in groups.values()
            if any(value != group[0][0] for value, _ in group)]


def bucket_effect(runs, environment):
    """Smallest against largest reduce_bucket_size: more reductions, less memory, longer step."""
    details, outcomes = [], []
    for group in groups_by([run for run in runs if stage_of(run)], BUCKET):
        (smallest, small), (largest, large) = group[0], group[-1]
        peaks = [r["peak_allocated_bytes"] for r in (small, large)]
        times = [r["median_step_seconds"] for r in (small, large)]
        whole = "either holds all gradients" if smallest >= environment["parameters"] else (
            "not counted" if None in (reductions(small), reductions(large)) else "")
        parts = [  # label, figures, unit and its name, sign of the expected gain, noise, why not
            ("reductions", *map(reductions, (small, large)), 1, "", 1, 0, whole),
            ("backward peak", *(p["backward"] for p in peaks), MB, " MB", -1,
             MEMORY_NOISE * peaks[1]["backward"], memory_unknown(environment)),
            ("step", *times, 1e-3, " ms", 1, time_noise(small, large),
             "ranks share a GPU" if environment["share_gpu"] else
             "no GPU: times drift from run to run" if memory_unknown(environment) else
             "too few steps" if min(map(timed_steps, (small, large))) < TIMED_STEPS else "")]
        texts = []
        for label, a, b, unit, name, sign, noise, reason in parts:
            gain = 0 if None in (a, b) else (a - b) * sign
            outcome = NA if reason or abs(gain) <= noise else "PASS" if gain > 0 else "FAIL"
            outcomes.append(outcome)
            figures = "" if None in (a, b) else f" {a / unit:,.{label == 'step':d}f} and " \
                f"{b / unit:,.{label == 'step':d}f}{name}"
            texts.append(f"{label}{figures} {outcome}"
                         + f" ({reason or 'within the noise'})" * (outcome == NA))
        if not parts[1][-1] and same_peak(peaks[0]["steady"], peaks[1]["steady"]):
            phase = max(PHASES[1:], key=lambda phase: peaks[0][phase])
            texts.append(f"overall peak unmoved, set by the {phase} phase")
        details.append(f"{small['name']} against {largest:,}: " + ", ".join(texts))
    return next((o for o in ("FAIL", "PASS") if o in outcomes), NA), (
        "; ".join(details) or "no two runs differ in reduce_bucket_size alone")


WHY_WITHOUT_EFFECT = {
    ALLGATHER: ": DeepSpeed gathers all at once where torch has all_gather_into_tensor (src: "
               "runtime/utils.py, all_gather_dp_groups)",
    BUCKET: ": one bucket of either size holds all gradients"}


def differences(a, b, environment):
    """What of losses, collectives, memory and time two runs differ in beyond the noise."""
    early, late, _, skip, alone = loss_gaps(a, b)
    alike = outside_zero(a) == outside_zero(b)        # a key that sets how to train: to the bit
    collectives = [run["collectives"] for run in (a, b)]
    peaks = [run["peak_allocated_bytes"] for run in (a, b)]
    unknown = memory_unknown(environment)
    untimed = unknown or environment["share_gpu"] or min(map(timed_steps, (a, b))) < TIMED_STEPS
    found = {"losses": skip is not None or alone is not None or early > LOSS_TOLERANCE * alike
             or late > LOSS_DRIFT * alike,
             "collectives": None not in collectives and collectives[0] != collectives[1],
             "memory": not unknown and not all(same_peak(*(p[phase] for p in peaks))
                                               for phase in PHASES[1:]),
             "time": not untimed and not same_time(a, b)}
    return [name for name, differs in found.items() if differs]


def knob_without_effect(runs, environment):
    """PASS where a swept key changed nothing, whatever else was swept: the same losses, collectives
    and peaks, times within the noise."""
    details, unknown = [], memory_unknown(environment)
    for key in {key: None for run in runs for key in run["swept"] if key != STAGE}:
        groups = groups_by(runs, key)
        pairs = [(run, group[0][1]) for group in groups for _, run in group[1:]]
        if not pairs:
            continue
        moved = {name: None for pair in pairs for name in differences(*pair, environment)}
        few = min(timed_steps(run) for pair in pairs for run in pair) < TIMED_STEPS
        counted = all(run["collectives"] is not None for pair in pairs for run in pair)
        low, high = groups[0][0][0], groups[0][-1][0]
        why = WHY_WITHOUT_EFFECT.get(key, "") * (key != BUCKET or low >= environment["parameters"])
        left = f"memory and time, {unknown}" if unknown else (
            "time, ranks share a GPU" if environment["share_gpu"] else "")
        effect = f"moved {', '.join(moved)}" if moved else "too few steps" if few else (
            "" if counted else "collectives not counted")
        left = f" (not compared: {left})" * bool(left)
        details.append((NA if effect else "PASS", f"{key.removeprefix(ZERO)} ({low} to {high})",
                        effect or f"changed nothing{why}{left}"))
    return "PASS" if any(o == "PASS" for o, _, _ in details) else NA, (
        together(details) or "no two runs differ in a swept key alone (the stage apart)")


def recommend(runs, environment):
    """After a sweep: the lowest peak among the runs as fast as the fastest (among all where times
    say nothing: a shared GPU, few steps); None where unknown, or where runs train otherwise.
    """
    def peak(run):
        return run["peak_allocated_bytes"]["steady"]

    runs = [r for r in runs if not r["error"] and r["median_step_seconds"]]
    alike = all(outside_zero(r) == outside_zero(runs[0]) for r in runs)
    if len(runs) < 2 or not any(r["swept"] for r in runs) or not alike or (
            memory_unknown(environment) or loss_agrees(runs)[0] == "FAIL"):
        return None
    fastest = min(runs, key=lambda r: r["median_step_seconds"])
    by_time = not environment["share_gpu"] and min(map(timed_steps, runs)) >= TIMED_STEPS
    tied = [r for r in runs if not by_time or same_time(r, fastest)]
    best = min(tied, key=lambda r: (round(peak(r) / (MEMORY_NOISE * peak(fastest))),
                                    r["median_step_seconds"]))
    smallest = min(runs, key=peak)
    slower = smallest["median_step_seconds"] / best["median_step_seconds"] - 1
    equal = [r["name"] for r in tied if r is not best and same_peak(peak(r), peak(best))]
    return {"run": best["name"], "peak_bytes": peak(best), "by_time": by_time,
            "median_step_seconds": best["median_step_seconds"], "as_good": equal,
            "cost_of_less": None if same_peak(peak(best), peak(smallest)) else
            f"{smallest['name']} needs {(peak(best) - peak(smallest)) / MB:,.0f} MB less and "
            f"{slower:+.0%} time"}


# ------------------------------------------------------------------------------- 9. output

def replace_file(path, data):
    """Write bytes into a file, whole or not at all."""
    path = Path(os.path.realpath(path))
    handle, part = tempfile.mkstemp(prefix=".train_zero2_", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except OSError:
        os.unlink(part)
        raise


def write_record(path, record):
    """The record as strict JSON: a figure that is not finite is a bug and raises."""
    try:
        replace_file(path, json.dumps(record, indent=1, allow_nan=False).encode())
    except OSError as error:
        raise RunFailed(f"--json {path}: {error.strerror}") from None


def table(rows, width):
    """Print rows of cells: the first column to the left, width wide; numbers as whole MB."""
    for first, *cells in rows:
        texts = ["-" if c is None else c if isinstance(c, str) else f"{c / MB:,.0f}" for c in cells]
        print(f"{first:<{width}}" + "".join(f"{text:>10}" for text in texts))


def print_header(environment):
    print("train_zero2: {model}, {parameters:,} parameters, {weights} weights, vocabulary of "
          "{vocabulary:,}; {world_size} rank(s), {device}, {backend}; torch {torch}, deepspeed "
          "{deepspeed}, transformers {transformers}".format(**environment))
    for notice in environment["notices"]:
        print(f"note: {notice}")


def print_step(record, peak, bar, total, seq_len):
    """The line of the step just made: on a bar for long runs on a terminal, else every so often."""
    step = record["steps"][-1]
    rate = record["config"]["train_batch_size"] * seq_len / step["seconds"]
    loss = "not finite" if step["loss"] is None else f"{step['loss']:.4f}"
    line = (f"loss {loss}  {step['seconds'] * 1e3:8.1f} ms  {rate:9,.0f} tokens/s"
            + (f"  scale {step['loss_scale']:g}" if step["loss_scale"] else "")
            + f"  peak {peak / MB:,.0f} MB" + "  warm-up" * step["warmup"]
            + "  skipped" * (not step["applied"]))
    if not bar.disable:
        bar.set_postfix_str(line, refresh=False)
        bar.update(step["step"] - bar.n)
    elif step["step"] <= 4 or step["step"] == total or step["step"] % max(1, total // 50) == 0:
        print(f"step {step['step']:>3}  {line}", flush=True)


def print_run(run, environment):
    """One run's memory by phase, expected beside measured, and its rates."""
    peaks, expected, floor = (run[key] for key in (
        "peak_allocated_bytes", "expected_bytes", "floor_bytes"))
    measured = [run["resident_bytes"], *(peaks[phase] for phase in PHASES)]
    model = [floor + expected["resident"], None, None, floor + expected["backward"],
             floor + expected["step"]]
    rows = [["\nMB, worst rank", "resident", *PHASES], ["measured", *measured]]
    if memory_unknown(environment):
        table(rows, 15)
        print(f"Peak resident set, no GPU: {peaks['overall'] / GB:.2f} GB")
    else:
        table([*rows, ["expected", *model], ["remainder", *(
            None if None in pair else pair[0] - pair[1] for pair in zip(measured, model))]], 15)
        used = run["device_used_bytes"]
        print(f"remainder: activations, logits, fragments; in all: {floor / MB:.0f} MB of cuBLAS "
              f"workspace (floor). Steady peak {(peaks['steady'] or 0) / MB:,.0f} MB on rank "
              f"{run['worst_rank']}; reserved {run['peak_reserved_bytes'] / MB:,.0f} MB; on the "
              f"device {f'{used / MB:,.0f} MB' if used else '(not available)'}, with CUDA context "
              "and NCCL")
    for repair in run["repairs"]:
        print(f"repaired: {repair}")
    if run["median_step_seconds"]:
        print(f"median step {run['median_step_seconds'] * 1e3:.1f} ms (interquartile range "
              f"{run['step_seconds_iqr'] * 1e3:.1f}), {run['tokens_per_second']:,.0f} tokens/s, "
              f"{run['padding_share']:.0%} padding; a step: " + (
                  "collectives not counted, DeepCompile's graph makes them"
                  if run["collectives"] is None else ", ".join(
                      f"{c['count']} {kind} ({c['bytes'] / MB:,.1f} MB)"
                      for kind, c in run["collectives"].items()) or "no collectives"))
    if environment["data"]:
        print(f"{run['tokens_seen']:,} tokens seen, epoch {run['steps'][-1]['epoch'] + 1}")
    if run["interrupted"]:
        print(f"stopped by a signal after step {run['steps'][-1]['step']}"
              + "; --save: nothing written" * ("saved" in run))
    if run["skipped_steps"]:
        print(f"{run['skipped_steps']} step(s) skipped: gradients overflowed")
    if not memory_unknown(environment):
        print(f"Peak GPU memory: {peaks['overall'] / GB:.2f} GB", flush=True)


def print_comparison(record):
    """The table of all runs, the verdicts, the recommendation, and what other sizes would need."""
    runs, environment = record["runs"], record["environment"]
    width = max(len(run["name"]) for run in runs) + 2
    rows = [["\nMB, worst rank", "backward", "step", "steady", "expected", "rank", "reduce", "ms",
             "last loss"]]
    for run in runs:
        if run["error"]:
            rows.append([f"{run['name']:<{width}}  failed: {run['error']}"])
            continue
        peaks, seconds = run["peak_allocated_bytes"], run["median_step_seconds"]
        counted = None if reductions(run) is None else str(reductions(run))
        steady = [str(run["worst_rank"]), counted, f"{seconds * 1e3:.1f}"] if seconds else (
            [None] * 3)
        rows.append([run["name"], peaks["backward"], peaks["step"], peaks["steady"],
                     None if memory_unknown(environment) else
                     run["floor_bytes"] + peak_of(run["expected_bytes"]), *steady,
                     f"{run['steps'][-1]['loss'] or math.nan:.4f}"])
    if len(runs) > 1:
        table(rows, width)
    left = max(run["floor_bytes"] for run in runs) - runs[0]["floor_bytes"]
    if left > MB and not memory_unknown(environment):
        print(f"warning: up to {left / MB:,.0f} MB of earlier runs were not given back; later "
              "peaks hold them")
    print()
    for verdict in record["verdicts"]:
        print(f"{verdict['outcome']:<15}{verdict['name']}: "
              + verdict["detail"].replace("; ", "\n" + " " * 17))
    if best := record["recommendation"]:
        print(f"recommended    {best['run']}: {best['peak_bytes'] / MB:,.0f} MB, "
              f"{best['median_step_seconds'] * 1e3:.1f} ms; "
              + (best["cost_of_less"] or "no setting needs less")
              + f"; as good: {', '.join(best['as_good'])}" * bool(best["as_good"])
              + "; by memory alone, times of a shared GPU or of few steps tell nothing"
              * (not best["by_time"]))
    if zero := next((r for r in reversed(runs) if not r["error"] and stage_of(r)), None):
        print_projection(zero, environment)


def print_projection(run, environment):
    """What the run's config would need elsewhere, on the worst rank, by GPT-2 size and ranks.

    What was measured beyond the expected backward peak is added in the measured model's row only.
    """
    config, backward = flatten(run["config"]), run["peak_allocated_bytes"]["backward"]
    activations = 0 if memory_unknown(environment) or not backward else max(
        0, backward - run["expected_bytes"]["backward"])
    print(f"\nGB expected on the worst rank with {run['name']} in {precision_of(config)}, "
          "resident/peak; activations and workspace: "
          + (f"{activations / MB:,.0f} MB as measured here, in this model's row" if activations
             else "not counted") + "; [ ]: measured here")
    ranks = sorted({1, 2, 4, 8, 16, 64, environment["world_size"]})
    rows = [["ranks", *map(str, ranks)]]
    for model in list(GPT2_SIZES)[1:]:
        sizes = gpt2_parameters(model)
        here, cells = sum(sizes) == environment["parameters"], []
        for n in ranks:
            worst = expectations(sizes, config, n)["expected_bytes"]
            peak = max(worst["backward"] + activations * here, worst["step"])
            cell = f"{worst['resident'] / GB:.1f}/{peak / GB:.1f}"
            cells.append(f"[{cell}]" if here and n == environment["world_size"] else cell)
        rows.append([model, *cells])
    table(rows, 15)


def plot(path, runs, environment):
    """PNG: peak by phase with expected marked, loss curves, and a bucket sweep on a log axis."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    rcParams["text.parse_math"] = False                           # a $ in a name is no formula
    runs = [run for run in runs if not run["error"] and run["median_step_seconds"]]
    swept = groups_by([run for run in runs if stage_of(run)], BUCKET)
    figure = Figure(figsize=(15 if swept else 11, 5.5), layout="constrained")
    bars, curves, *rest = figure.subplots(1, 3 if swept else 2)
    colours = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"]
    width, phases = 0.8 / max(1, len(runs)), PHASES[1:]           # colours of Okabe and Ito
    for i, run in enumerate(runs):
        at = [p + (i - (len(runs) - 1) / 2) * width for p in range(3)]
        bars.bar(at, [run["peak_allocated_bytes"][p] / GB for p in phases], width * 0.92,
                 color=colours[i % 7], hatch=("", "//", "..", "xx")[i // 7 % 4], label=run["name"])
        if not memory_unknown(environment):
            bars.plot(at[1:], [(run["floor_bytes"] + run["expected_bytes"][p]) / GB
                               for p in phases[1:]], "k_", markersize=9,
                      label="expected" if run is runs[-1] else None)
        steps = [(s["step"], s["loss"]) for s in run["steps"] if s["loss"] is not None]
        curves.plot(*zip(*steps), color=colours[i % 7], linestyle=("-", "--", ":", "-.")[i % 4],
                    linewidth=1 + 3 * (len(runs) - i) / len(runs), label=run["name"])
    bars.set_xticks(range(3), phases)
    bars.set(ylabel="GB on the worst rank", ylim=(0, bars.get_ylim()[1] * 1.1),
             title=f"{environment['model']}, {environment['world_size']} rank(s): peak memory")
    curves.set(title="Loss (curves lie over each other)", xlabel="step", ylabel="loss")
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower left", fontsize=8, ncols=3)
    for axis in rest:
        twin = axis.twinx()
        for group, style in zip(swept, ("o-", "s--", "^:", "d-.")):
            values, name = [v for v, _ in group], group[0][1]["name"].split(" reduce_bucket")[0]
            axis.semilogx(values, [r["median_step_seconds"] * 1e3 for _, r in group], style,
                          color=colours[0], label=f"step time, {name}")
            twin.plot(values, [r["peak_allocated_bytes"]["backward"] / GB for _, r in group], style,
                      color=colours[5], label=f"backward peak, {name}")
        sizes = sorted({value for group in swept for value, _ in group})
        axis.set_xticks(sizes, [f"{size:g}".replace("e+0", "e") for size in sizes], fontsize=8)
        axis.minorticks_off()
        axis.set(title="Bucket size", xlabel="reduce_bucket_size (elements)")
        axis.set_ylabel("median step (ms)", color=colours[0])
        twin.set_ylabel("backward peak (GB)", color=colours[5])
        lines = axis.get_lines() + twin.get_lines()
        axis.legend(lines, [line.get_label() for line in lines], fontsize=8, ncols=2,
                    loc="upper center", bbox_to_anchor=(0.5, -0.14))
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format="png")
    try:
        replace_file(path, image.getvalue())
    except OSError as error:
        raise RunFailed(f"--plot {path}: {error.strerror}") from None


# --------------------------------------------------------------------------------- 10. main

def describe(args, launch, found, model, vocabulary, runs):
    """The record's environment: what the figures depend on."""
    import deepspeed
    import torch
    import transformers
    return {"command": " ".join(sys.argv), "world_size": launch.world_size,
            "backend": launch.backend, "share_gpu": launch.shared > 1,
            "device": torch.cuda.get_device_name(launch.device) if launch.on_gpu else "CPU",
            "memory_kind": "cuda_allocator" if launch.on_gpu else "resident_set",
            "torch": torch.__version__, "deepspeed": deepspeed.__version__,
            "transformers": transformers.__version__, "model": found["name"],
            "weights": "pretrained" if found["pretrained"] else "random",
            "vocabulary": vocabulary,
            "parameters": sum(p.numel() for p in model.parameters()),
            "precision": " and ".join({precision_of(run.config): None for run in runs}),
            "seq_len": args.seq_len, "seed": args.seed, "steps": args.steps,
            "notices": launch.notices,
            "data": str(args.data) if args.data else None}


def settle_precision(runs, args, launch):
    """auto: fp32 where the device cannot do the JSON's precision; asked for by flag: refused."""
    from deepspeed.accelerator import get_accelerator
    can = {"fp16": get_accelerator().is_fp16_supported(), "fp32": True,
           "bf16": get_accelerator().is_bf16_supported()}
    lacking = {precision_of(run.config) for run in runs if not can[precision_of(run.config)]}
    for wanted in lacking:
        if args.precision != "auto":
            raise Refused(f"--precision {wanted}: this device cannot do it; use fp32")
        if any(key.startswith(wanted) for run in runs for key in run.swept):
            raise Refused(f"--sweep: this device cannot do {wanted}; nothing to compare")
        launch.notices.append(f"{wanted} is not to be had on this device: training in fp32.")
        for run in runs:
            run.config.pop(f"{wanted}.enabled", None)


def load(args, launch, runs):
    """Tokenizer, model, text (None: the sentences) and environment; ranks agree on all of it."""
    if not launch.on_gpu and any(run.config.get("compile.deepcompile") for run in runs):
        raise Refused('"compile.deepcompile": true needs a GPU; remove it')
    settle_precision(runs, args, launch)
    if args.resume:
        now, saved = precision_of(runs[0].config), last_checkpoint(args.checkpoint)[1]["precision"]
        if now != saved:
            raise Refused(f"--resume: the checkpoint is in {saved}, this run in {now}")
    [found] = launch.decide(launch.rank == 0, find_model, args)
    if found["hub"] and launch.rank:                  # other hosts fetch what rank 0 found
        found["folder"] = fetch(found["name"])
    launch.notices += [found["notice"]] if found["notice"] else []
    config, tokenizer, text = load_config(found), load_tokenizer(found), None
    check_positions(args, config.n_positions)                     # a Hub model of its own kind
    if (last := max(tokenizer.get_vocab().values())) >= config.vocab_size:
        raise Refused(f"--model {found['name']}: token number {last} in the vocabulary, "
                      f"{config.vocab_size} tokens in the model: they do not belong together")
    if args.data:
        text = text_data(args, launch, tokenizer,
                         launch.world_size * max(run.config[MICRO] for run in runs))
    model = load_model(found, config, args.seed)
    if args.memory_snapshot and not launch.on_gpu:
        launch.notices.append("--memory-snapshot: needs a GPU; nothing will be written.")
    launch.notices += foresee(runs, [p.numel() for p in model.parameters()], launch.world_size,
                              launch.on_gpu)
    return tokenizer, model, text, describe(args, launch, found, model, len(tokenizer), runs)


def train(args, runs, launch, stop):
    """Connect, load, make every run, compare; returns the exit status."""
    connect(launch, args)
    tokenizer, model, text, environment = load(args, launch, runs)
    prepare_device(launch)
    record = {"schema": 1, "environment": environment, "runs": [], "verdicts": [],
              "recommendation": None}
    first = launch.rank == 0
    if first:
        print_header(environment)
    for run in runs:
        if first and len(runs) > 1:
            print(f"\n== {run.name}")
        dataset = text or sentence_data(tokenizer, args.seq_len, run.config["train_batch_size"])
        done = attempt(Job(run, args, launch, model, tokenizer, dataset, stop))
        record["runs"].append(done)
        if first:
            print(f"failed: {done['error']}") if done["error"] else print_run(done, environment)
            if args.json:
                write_record(args.json, record)
        if stopped := any(launch.gather(stop.signal)):
            break
    if first:
        record["verdicts"] = compare(record["runs"], environment)
        record["recommendation"] = recommend(record["runs"], environment)
        print_comparison(record)
        if args.json:
            write_record(args.json, record)
        if args.plot:
            plot(args.plot, record["runs"], environment)
    failed = any(run["error"] for run in record["runs"]) or any(
        verdict["outcome"] == "FAIL" for verdict in record["verdicts"])
    failed = launch.gather(failed)[0]                 # nobody leaves before rank 0 has reported
    return 128 + signal.SIGINT if stopped else int(failed)


def attempt(job):
    """execute; a failure that all ranks share becomes a record with an error, and the rest go on.

    One that other ranks do not share would leave them waiting: it is raised after a short while.
    """
    import torch.distributed as dist
    from tqdm import tqdm
    run, args, launch = job.run, job.args, job.launch
    disable = True if launch.rank or args.steps <= 50 else None             # None: no terminal
    record = {"name": run.name, "config": unflatten(run.config), "swept": run.swept, "steps": [],
              "error": None}
    try:
        with tqdm(total=args.steps, disable=disable, unit="step") as bar:
            execute(record, job, lambda *seen: (
                None if launch.rank else print_step(*seen, bar, args.steps, args.seq_len)))
        return record
    except RunFailed as error:
        message = str(error)
    store, key = dist.distributed_c10d._get_default_store(), f"{run.name} failed on "
    store.set(key + str(launch.rank), message)            # a collective could meet the others' own
    try:
        store.wait([key + str(rank) for rank in range(launch.world_size)], AGREE_TIMEOUT)
    except RuntimeError:
        raise RunFailed(message) from None
    return record | {"error": store.get(key + "0").decode()}


def leave(launch, message, status):
    """Say message once per launch and exit: other ranks wait, so that rank 0 is heard first."""
    with contextlib.suppress(Exception):              # a pipe or a disk that is gone or full
        sys.stdout.flush()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if launch.rank:
        time.sleep(REFUSAL_DELAY_SECONDS)
    print(message if "Traceback" in message else " ".join(message.splitlines()), file=sys.stderr,
          flush=True)
    os._exit(status)                       # past NCCL and gloo threads that wait for other ranks


def main(argv=None):
    rank = os.environ.get("RANK", "0")
    launch = Launch(int(rank) if rank.isdecimal() else 0, 1, 0)
    if sys.stdout:                                                # None where it is closed
        sys.stdout.reconfigure(errors="backslashreplace")         # a terminal without Unicode
    try:
        launch = read_launch()
        args = parse_arguments(argv)
        check_versions()
        runs = plan_runs(args, launch.world_size)
        check_arguments(args, runs)
        if args.resume:
            check_resume(runs[0], args, launch.world_size)
        if not args.verbose:
            logging.disable(logging.WARNING)
            warnings.filterwarnings("ignore")
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        status = train(args, runs, launch, StopRequest())
    except Refused as error:
        leave(launch, f"train_zero2: refused: {error}", 2)
    except RunFailed as error:
        leave(launch, f"train_zero2: failed: {error}", 1)
    except KeyboardInterrupt:
        leave(launch, "train_zero2: interrupted", 130)
    except BrokenPipeError:                                      # | head
        leave(launch, "train_zero2: failed: nobody reads the output", 1)
    except Exception as error:                                   # ours, or another rank's end
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            leave(launch, f"train_zero2: failed: {first_line(error)}", 1)
        lost = re.search(r"(?i)closed by peer|timed out|connection reset|broken pipe", str(error))
        leave(launch, f"train_zero2: failed: rank {launch.rank} waited for a rank that stopped, or "
              f"stalled for {COLLECTIVE_TIMEOUT.seconds} s: {first_line(error)}"
              if lost else traceback.format_exc(), 1)
    import torch.distributed as dist
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
