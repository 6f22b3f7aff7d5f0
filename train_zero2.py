#!/usr/bin/env python3
"""What does DeepSpeed ZeRO stage 2 do to GPT-2 training, on this machine?

Trains GPT-2 for a few steps through `deepspeed.initialize`, as a DeepSpeed JSON says, and measures:
  1. how much memory stage 2 saves against stage 0 (plain data parallelism), on which rank and in
     which phase; how much of it is the optimizer states (stage 1), how much the gradients (stage 2);
  2. whether training is still right: the loss falls, and it is the same at every stage;
  3. what bucket sizes do to memory and time, and which setting to use.

    python train_zero2.py                                  # one process, on a GPU or a CPU
    deepspeed --num_gpus=2 train_zero2.py --config ds_config_zero2.json
    deepspeed --num_gpus=2 train_zero2.py --config ds_config_stage0.json ds_config_zero2.json
    deepspeed --num_gpus=2 train_zero2.py --sweep reduce_bucket_size=1e6,1e7,5e7
    torchrun --nproc-per-node=4 train_zero2.py --sweep stage=0,1,2 --share-gpu    # one card will do

Rank 0 prints one line a step, a table of peak memory by phase (expected beside measured), and for
several runs a comparison, verdicts (PASS, FAIL, NOT APPLICABLE) and a recommendation; --json FILE
holds every figure raw. Exit status: 0 well, 1 a verdict or a run failed, 2 input refused, 130
interrupted. Sections: 1 constants, 2 command line, 3 configuration, 4 ranks and devices, 5 model
and batches, 6 measuring, 7 one run, 8 several runs, 9 output, 10 main.
"""
import argparse
import codecs
import contextlib
import copy
import dataclasses
import difflib
import gc
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
import warnings
from pathlib import Path

# ------------------------------------------------------------------------------ 1. constants

GB, MB = 1e9, 1e6                      # decimal, as on a data sheet
WARMUP_STEPS = 3                       # allocator and kernel caches fill; enter no verdict
HUB_WAIT_SECONDS = 15                  # then the Hub counts as unreachable
COLLECTIVE_TIMEOUT_SECONDS = 600       # a rank that stalls longer ends the launch
AGREE_TIMEOUT_SECONDS = 20             # for every rank to report that a run failed
REFUSAL_DELAY_SECONDS = 2              # a launcher that sees another rank exit kills rank 0 unheard
LOSS_TOLERANCE = 1e-3                  # relative; fp16 reductions in another order differ by ~1e-4
MEMORY_NOISE = 0.01                    # relative; the same run twice differs by less on a GPU
TIME_NOISE = 0.02                      # relative, or the interquartile range where that is larger
STAGE0_BUCKET = 500_000_000            # elements; MEMORY_OPT_ALLREDUCE_SIZE in DeepSpeed's engine
IGNORED = -100                         # label that no loss is taken from

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
    """A run ended early. The message is one line: phase, rank, cause and what would help."""


# --------------------------------------------------------------------------- 2. command line

class ArgumentParser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(f"{message} (see --help)")


def parse_arguments(argv):
    """Parse the command line. Raises Refused; answers --help by itself. Imports no torch."""
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
    if not args.checkpoint and (args.resume or args.checkpoint_every):
        raise Refused("--resume and --checkpoint-every need --checkpoint DIR")
    return args


def check_outputs(args, run_count):
    """Refuse outputs that cannot be written or that make no sense, before anything is loaded."""
    for flag in ("save", "checkpoint"):
        if getattr(args, flag) and run_count > 1:
            raise Refused(f"--{flag} takes one run; this command makes {run_count}")
    for flag in ("json", "plot", "memory_snapshot", "save", "checkpoint"):
        path = getattr(args, flag)
        if path is None:
            continue
        wants_folder, name = flag in ("save", "checkpoint"), f"--{flag.replace('_', '-')} {path}"
        if path.exists() and path.is_dir() != wants_folder:
            raise Refused(f"{name}: {'not a' if wants_folder else 'is a'} folder; name another")
        if flag == "save" and path.exists() and any(path.iterdir()):
            raise Refused(f"{name}: the folder is not empty; name a new one")
        parent = next(p for p in (path, *path.absolute().parents) if p.is_dir())
        if not wants_folder and parent != path.absolute().parent:
            raise Refused(f"{name}: no such folder {path.parent}; create it first")
        try:
            with tempfile.TemporaryFile(dir=parent):
                pass
        except OSError as error:
            raise Refused(f"{name}: cannot write there: {error.strerror}") from None
    if args.plot and args.plot.suffix.lower() != ".png":
        raise Refused(f"--plot {args.plot}: writes PNG; end the name in .png")
    if args.data and not args.data.is_file():
        raise Refused(f"--data {args.data}: no such file")


# -------------------------------------------------------------------------- 3. configuration

@dataclasses.dataclass(frozen=True)
class Key:
    """What one configuration key takes: an exact type, inclusive bounds or a set of choices."""
    kind: type
    low: float = None
    high: float = None
    choices: tuple = None

    def describe(self):
        if self.choices:
            return "one of " + ", ".join(json.dumps(c) for c in self.choices)
        noun = {int: "a whole number", float: "a number", bool: "true or false",
                list: "two numbers", str: "a string"}[self.kind]
        low = "" if self.low is None else f" from {self.low:g}"
        return noun + low + ("" if self.high is None else f" to {self.high:g}")


ZERO = "zero_optimization."
BUCKET, ALLGATHER_BUCKET = ZERO + "reduce_bucket_size", ZERO + "allgather_bucket_size"
CONFIG_KEYS = {
    "train_batch_size": Key(int, 1, 1e9),
    "train_micro_batch_size_per_gpu": Key(int, 1, 1e9),
    "gradient_accumulation_steps": Key(int, 1, 1e9),
    "gradient_clipping": Key(float, 0, 1e9),
    "steps_per_print": Key(int, 1, 1e9),
    "optimizer.type": Key(str, choices=("Adam", "AdamW")),
    "optimizer.params.lr": Key(float, 0, 1e3),
    "optimizer.params.betas": Key(list, 0, 1),
    "optimizer.params.eps": Key(float, 0, 1),
    "optimizer.params.weight_decay": Key(float, 0, 1e3),
    "optimizer.params.torch_adam": Key(bool),
    "optimizer.params.fused": Key(bool),
    "fp16.enabled": Key(bool),
    "fp16.loss_scale": Key(float, 0, 2.0 ** 60),
    "fp16.initial_scale_power": Key(int, 0, 60),
    "fp16.loss_scale_window": Key(int, 1, 1e9),
    "fp16.hysteresis": Key(int, 1, 1e9),
    "fp16.min_loss_scale": Key(int, 1, 2 ** 60),
    "bf16.enabled": Key(bool),
    ZERO + "stage": Key(int, choices=(0, 1, 2)),
    BUCKET: Key(int, 1, 1e10),                                # elements, not bytes
    ALLGATHER_BUCKET: Key(int, 2, 1e10),                      # elements; DeepSpeed asserts even
    ZERO + "overlap_comm": Key(bool),
    ZERO + "contiguous_gradients": Key(bool),
    ZERO + "reduce_scatter": Key(bool),
    ZERO + "allgather_partitions": Key(bool),
    ZERO + "use_multi_rank_bucket_allreduce": Key(bool),
    ZERO + "round_robin_gradients": Key(bool),
    ZERO + "compute_grad_norm": Key(bool),
    ZERO + "offload_optimizer.device": Key(str, choices=("cpu", "none")),
    ZERO + "offload_optimizer.pin_memory": Key(bool),
    "checkpoint.load_universal": Key(bool),
    "compile.deepcompile": Key(bool),
}
SECTIONS = {path.rpartition(".")[0] for path in CONFIG_KEYS}
SECTIONS |= {section.rpartition(".")[0] for section in SECTIONS}


def read_config(path):
    """Parse one JSON file into a dict. Raises Refused with line and column, or the byte offset."""
    def unique(pairs):
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise Refused(f"{path}: {json.dumps(twice)} stands twice in one section; remove one")
        return dict(pairs)

    def no_constant(text):
        raise Refused(f"{path}: {text} is not JSON; write a finite number")

    try:
        text = path.read_bytes().decode("utf-8-sig")
        config = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except OSError as error:
        raise Refused(f"--config {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Refused(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise Refused(f"{path}, line {error.lineno}, column {error.colno}: not JSON: {error.msg} "
                      "(JSON has no comments and no trailing commas)") from None
    except (ValueError, RecursionError) as error:      # a number of 5,000 digits, 10,000 brackets
        raise Refused(f"{path}: not usable JSON: {str(error)[:60]}; write it plainly") from None
    if not isinstance(config, dict):
        raise Refused(f"{path}: must hold one JSON object {{...}}, not {type(config).__name__}")
    return config


def flatten(config, prefix=""):
    """Nested dict to {dotted path: value}; only known sections are descended into."""
    flat = {}
    for name, value in config.items():
        path = prefix + name
        if path in SECTIONS and isinstance(value, dict):
            flat |= flatten(value, path + ".") or {path: None}
        else:
            flat[path] = value
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
                      f"write {spec.describe()}")
    number = type(value) in (int, float) and math.isfinite(value)
    fits = {bool: type(value) is bool, str: type(value) is str, float: number,
            int: number and value == int(value),
            list: type(value) is list and len(value) == 2 and all(
                type(v) in (int, float) and spec.low <= v < spec.high for v in value)}[spec.kind]
    if fits and spec.kind in (int, float):
        value = int(value) if spec.kind is int else value
        fits = (spec.low is None or value >= spec.low) and (spec.high is None or value <= spec.high)
    if fits and (spec.choices is None or value in spec.choices):
        return value
    fix = f"write {spec.describe()}"
    if type(value) is str and spec.kind is not str:
        with contextlib.suppress(ValueError, Refused):
            check_value(path, json.loads(value))
            fix += f": {value}, not {shown}"
    raise Refused(f'"{path}": {shown} cannot be used; {fix}')


def check_config(config, world_size):
    """Check a parsed config against the closed table and resolve it.

    Args: config (dict as parsed); world_size (ranks). Returns {dotted path: exact value} with the
    batch sizes, clipping, stage and precision stated. Raises Refused naming the key and the fix.
    """
    flat = flatten(config)
    for path, value in flat.items():
        if path in SECTIONS:
            if value is None:
                continue                                          # an empty section
            raise Refused(f'"{path}": takes a section {{...}}, not {json.dumps(value)[:60]}')
        if path not in CONFIG_KEYS:
            known = {p.rpartition(".")[2]: p for p in [*CONFIG_KEYS, *SECTIONS] if p}
            close = difflib.get_close_matches(path.rpartition(".")[2], known, 1, 0.75)
            hint = f'; did you mean "{known[close[0]]}"?' if close else "; remove it"
            raise Refused(f'"{path[:80]}" is not used by this experiment{hint}')
    flat = {path: check_value(path, value) for path, value in flat.items() if path in CONFIG_KEYS}
    flat.setdefault(ZERO + "stage", 0)
    stage = flat[ZERO + "stage"]
    if "optimizer.type" not in flat:
        raise Refused('"optimizer" is missing; add {"type": "AdamW", "params": {"lr": 5e-5, '
                      '"torch_adam": true, "fused": true}}')
    if not flat.get("optimizer.params.torch_adam"):
        raise Refused('"optimizer.params.torch_adam": write true; without it DeepSpeed compiles an '
                      "optimizer of its own with nvcc at every first start")
    if flat.get("fp16.enabled") and flat.get("bf16.enabled"):
        raise Refused('"fp16.enabled" and "bf16.enabled" are both true; keep one')
    if flat.get(ALLGATHER_BUCKET, 2) % 2:
        size = flat[ALLGATHER_BUCKET]
        raise Refused(f'"{ALLGATHER_BUCKET}": {size} must be even; write {size + 1}')
    flat.setdefault("gradient_clipping", 1.0)             # DeepSpeed's default since 0.19; stated
    flat.setdefault("optimizer.params.lr", 1e-3)          # torch's default; stated
    offload = flat.get(ZERO + "offload_optimizer.device") == "cpu"
    if offload and stage == 0:
        raise Refused(f'"{ZERO}offload_optimizer" works at stages 1 and 2; set the stage')
    if not flat.get(ZERO + "compute_grad_norm", True) and (
            flat["gradient_clipping"] or offload or not stage):
        raise Refused(f'"{ZERO}compute_grad_norm": false needs stage 1 or 2, '
                      '"gradient_clipping": 0 and no offload')
    return flat | resolve_batch(flat, world_size)


def resolve_batch(flat, ranks):
    """The three batch sizes that satisfy train = micro x accumulation x ranks, or Refused."""
    train, micro, accumulation = (flat.get(key) for key in (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    if train is None and micro is None:
        raise Refused('no batch size; add "train_micro_batch_size_per_gpu"')
    if micro is None:
        micro = train // ((accumulation or 1) * ranks)
    accumulation = accumulation or (train // (micro * ranks) if train and micro else 1)
    if train not in (None, micro * accumulation * ranks) or micro < 1 or accumulation < 1:
        raise Refused(
            f'"train_batch_size": {train} is not {micro} per GPU x {accumulation} accumulation '
            f'steps x {ranks} ranks = {micro * accumulation * ranks}; remove it and set '
            '"train_micro_batch_size_per_gpu", which holds for any number of ranks')
    return {"train_batch_size": micro * accumulation * ranks,
            "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}


def parse_sweep(text):
    """'KEY=V1,V2' to (dotted path, [(text, value), ...]). Raises Refused with did-you-mean."""
    name, equals, values = text.partition("=")
    found = next((p for p in (ZERO + name, name) if p in CONFIG_KEYS), None)
    if found is None:
        known = {p.removeprefix(ZERO): p for p in CONFIG_KEYS}
        close = difflib.get_close_matches(name, known, 1)
        raise Refused(f"--sweep {text[:80]}: no key {name[:60]!r}" + (
            f"; did you mean {close[0]}?" if close else "; see the table of keys in README.md"))
    parsed = []
    for value in values.split(",") if equals else []:
        try:
            parsed.append((value, json.loads(value)))
        except ValueError:
            parsed.append((value, value))                         # a bare word: cpu, none
    if not parsed or not all(shown for shown, _ in parsed):
        raise Refused(f"--sweep {text[:80]}: write KEY=V1,V2,...")
    return found, parsed


@dataclasses.dataclass
class Run:
    """One run to make: its name, the resolved config (dotted), and what a sweep set in it."""
    name: str
    config: dict
    swept: dict


def plan_runs(args, world_size):
    """Read and check every config and sweep: the list of runs, in order. Raises Refused."""
    sweeps, runs = [parse_sweep(text) for text in args.sweep], {}
    for path in args.config:
        config = flatten(read_config(path))
        for values in itertools.product(*(values for _, values in sweeps)):
            swept = {key: value for (key, _), value in zip(sweeps, values)}
            at = config | {key: value for key, (_, value) in swept.items()}
            if not at.get(ZERO + "stage"):              # no other key of the section works there
                swept = {k: v for k, v in swept.items() if k == ZERO + "stage" or ZERO not in k}
            try:
                chosen = config | {key: value for key, (_, value) in swept.items()}
                resolved = check_config(unflatten(chosen), world_size)
            except Refused as error:
                raise Refused(f"{path}: {error}") from None
            if args.precision != "auto":
                resolved |= {f"{p}.enabled": args.precision == p for p in ("fp16", "bf16")}
            name = " ".join([path.stem] + [f"{key.removeprefix(ZERO)}={shown}"
                                           for key, (shown, _) in swept.items()])
            swept = {key: resolved[key] for key in swept}
            if all(run.config != resolved for run in runs.values()) or not args.sweep:
                runs.setdefault(name, Run(name, resolved, swept))
    return list(runs.values())


def precision_of(config):
    """'fp16', 'bf16' or 'fp32', from a resolved config."""
    return next((p for p in ("fp16", "bf16") if config.get(f"{p}.enabled")), "fp32")


# ---------------------------------------------------------------------- 4. ranks and devices

@dataclasses.dataclass
class Launch:
    """This process among the ranks, its device, and what was decided on the way (notices)."""
    rank: int
    world_size: int
    local_rank: int                        # as the launcher counts; names the node's first rank
    device: object = None
    backend: str = None
    control: object = None                 # a gloo group: the script's own traffic, on the CPU
    shared: bool = False
    notices: list = dataclasses.field(default_factory=list)

    @property
    def on_gpu(self):
        return self.device.type == "cuda"

    def gather(self, value):
        """Every rank's value, in order of rank; all ranks call it."""
        import torch.distributed as dist
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def decide(self, function, *arguments):
        """What function returns on rank 0, on every rank; a refusal there is one everywhere."""
        import torch.distributed as dist
        outcome = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = function(*arguments)
            except Refused as error:
                outcome[1] = str(error)
        dist.broadcast_object_list(outcome, src=0, group=self.control)
        if outcome[1] is not None:
            raise Refused(outcome[1])
        return outcome[0]


def read_launch():
    """Rank and world size from what the launcher set, and the variables DeepSpeed wants.

    torchrun and deepspeed set RANK, WORLD_SIZE and LOCAL_RANK, mpirun OMPI_COMM_WORLD_*, srun
    SLURM_*; else this is one process. Raises Refused where one of them is not a number.
    """
    env = os.environ
    names = [("RANK", "WORLD_SIZE", "LOCAL_RANK"),
             ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")]
    if "SLURM_STEP_ID" in env and "MASTER_ADDR" in env:           # srun, told where rank 0 is
        names.append(("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
    source = next((n for n in names if all(name in env for name in n)), None)
    if source is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=port)
        return Launch(0, 1, 0)
    try:
        rank, world_size, local_rank = (int(env[name]) for name in source)
    except ValueError:
        raise Refused(f"{', '.join(source)}: set by a launcher, must be whole numbers") from None
    env.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    env.setdefault("MASTER_PORT", "29500")
    return Launch(rank, world_size, local_rank)


def connect(launch, share_gpu):
    """Choose the device and join the ranks. Raises Refused where two ranks meet on one GPU."""
    import datetime
    import torch
    import torch.distributed as dist
    import deepspeed
    # DeepSpeed would compile a shared-memory all-reduce for CPUs at init (src: comm/torch.py).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    launch.device, launch.backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        index = launch.local_rank % torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(index)
        if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:            # DeepSpeed asserts they agree
            os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = str(index)
        launch.device, launch.backend = torch.device("cuda", index), "nccl"
        torch.cuda.set_device(launch.device)
        version = ".".join(map(str, torch.cuda.nccl.version()))
        if share_gpu and torch.cuda.nccl.version() >= (2, 30):
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        elif share_gpu:
            launch.backend = "gloo"
    elif share_gpu:
        launch.notices.append("--share-gpu: no GPU here; ranks share the CPU anyway.")
    wait = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
    dist.init_process_group(launch.backend, rank=launch.rank, world_size=launch.world_size,
                            timeout=wait)
    launch.control = dist.new_group(backend="gloo", timeout=wait)
    if launch.on_gpu:                                             # before NCCL's first collective
        uuid = str(torch.cuda.get_device_properties(launch.device).uuid)
        devices = launch.gather((socket.gethostname(), uuid))
        launch.shared = len(set(devices)) < len(devices)
        if launch.shared and not share_gpu:
            raise Refused(f"{launch.world_size} ranks on {len(set(devices))} GPU(s): add "
                          "--share-gpu to measure memory so, or start one rank per GPU")
        if launch.shared:
            launch.notices.append(
                f"{launch.world_size} ranks share {len(set(devices))} GPU(s) over {launch.backend} "
                f"(NCCL {version}; 2.30 or later can, else gloo): memory per rank is what separate "
                "GPUs would show, step times are not.")
    deepspeed.init_distributed(dist_backend=launch.backend, verbose=False)


# ------------------------------------------------------------------- 5. model and batches

def gpt2_config(name):
    """transformers' configuration of a GPT-2 size that is known without a network."""
    from transformers import GPT2Config
    width, layers, heads = GPT2_SIZES[name]
    return GPT2Config(n_embd=width, n_layer=layers, n_head=heads)


def fetch(name, revision=None, local=False):
    """The local folder of a Hub repository (weights, configuration, vocabulary)."""
    from huggingface_hub import snapshot_download
    return snapshot_download(name, revision=revision, local_files_only=local, allow_patterns=[
        "config.json", "generation_config.json", "model*.safetensors*", "vocab.json", "merges.txt",
        "tokenizer*.json", "special_tokens_map.json"])


def hub_answers(name):
    """None if the Hub knows name, else why not; gives up after HUB_WAIT_SECONDS."""
    from huggingface_hub import HfApi
    answer = [f"no answer in {HUB_WAIT_SECONDS} s"]

    def ask():
        try:
            HfApi().model_info(name, timeout=HUB_WAIT_SECONDS)
            answer[0] = None
        except Exception as error:                    # whatever the client raises is the answer
            answer[0] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_WAIT_SECONDS)
    return answer[0]


def has(folder, what):
    """Whether a folder holds 'weights', a 'vocabulary' or a 'config'."""
    names = {"weights": ("model*.safetensors", "pytorch_model*.bin"), "config": ("config.json",),
             "vocabulary": ("tokenizer.json", "vocab.json")}[what]
    return folder is not None and any(any(Path(folder).glob(name)) for name in names)


def find_model(args):
    """On rank 0: where weights, configuration and vocabulary come from. Raises Refused.

    Returns {"name", "folder" (None for a size known here), "hub" (None for a local folder),
    "pretrained" (bool), "vocabulary" ("model" or "bytes"), "notice" (None or one line)}.
    """
    name = args.model or "gpt2"
    out = f"name a folder that save_pretrained wrote, or add --random-weights (knows " \
          f"{', '.join(GPT2_SIZES)})"
    folder, hub, why, pretrained = None, None, None, not args.random_weights
    if Path(name).is_dir():
        folder = name
    else:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            raise Refused(f"--model {name}: no such folder; {out}")
        with contextlib.suppress(Exception):          # not in the cache, or not whole
            folder = fetch(name, local=True)
        whole = has(folder, "weights") and has(folder, "vocabulary")
        if not whole and name != "gpt2-tiny" and (pretrained or name not in GPT2_SIZES):
            why = hub_answers(name)
            folder = fetch(name) if why is None else folder
        hub = name if folder else None
    if pretrained and not has(folder, "weights"):
        why = why or "no weights (model.safetensors) there"
        if args.model:
            raise Refused(f"--model {name}: cannot be loaded: {why}; {out}")
        pretrained = False
    if pretrained and not has(folder, "vocabulary"):
        raise Refused(f"--model {name}: weights without their vocabulary (tokenizer.json): other "
                      "tokens would mean nothing to them; add it, or --random-weights")
    if not pretrained and not has(folder, "config") and name not in GPT2_SIZES:
        raise Refused(f"--model {name}: no config.json; {out}")
    notice = (f"gpt2 could not be fetched ({why}): RANDOM WEIGHTS instead; --model DIR for a local "
              "folder." if not pretrained and not args.random_weights else None)
    return {"name": name, "folder": folder if has(folder, "config") else None, "hub": hub,
            "pretrained": pretrained, "notice": notice,
            "vocabulary": "model" if has(folder, "vocabulary") else "bytes"}


def load_tokenizer(found):
    """The model's GPT2Tokenizer, or one of 256 byte tokens where no vocabulary is at hand."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import AutoTokenizer, GPT2Tokenizer
    if found["vocabulary"] == "model":
        tokenizer = AutoTokenizer.from_pretrained(found["folder"], local_files_only=True)
    else:
        alphabet = sorted(ByteLevel.alphabet())
        vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, "<|endoftext|>"])}
        tokenizer = GPT2Tokenizer(vocab=vocabulary, merges=[])
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(found, seed):
    """GPT2LMHeadModel in fp32 on the CPU; the same weights on every rank. Raises Refused."""
    import torch
    from transformers import AutoConfig, GPT2LMHeadModel
    folder = found["folder"]
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True) if folder \
            else gpt2_config(found["name"])
        if config.model_type != "gpt2":
            raise Refused(f"--model {found['name']}: is a {config.model_type}; this experiment "
                          "trains GPT-2")
        if config.activation_function == "gelu_new":
            config.activation_function = "gelu_pytorch_tanh"   # the same function in one kernel
        torch.manual_seed(seed)
        if not found["pretrained"]:
            return GPT2LMHeadModel(config)
        return GPT2LMHeadModel.from_pretrained(folder, config=config, dtype=torch.float32,
                                               local_files_only=True)
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else repr(error)
        raise Refused(f"--model {found['name']}: cannot be loaded: {reason}") from None


def define_loss(model):
    """Wrap model so that forward(input_ids (B, T), labels (B, T)) is the mean next-token loss.

    Labels of -100 are left out; the result is an fp32 scalar. Pads stand to the right of all real
    tokens, so a causal model needs no attention mask. The fp32 logits never exist whole: forward
    and backward go over 1024 positions at a time, and the gradient takes the logits' own memory.
    """
    import torch

    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, labels):
            total = torch.cat([part.float().logsumexp(-1) for part in logits.split(1024)])
            kept = labels != IGNORED
            target = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0].float()
            ctx.save_for_backward(logits, labels, total, kept)
            return ((total - target) * kept).sum() / kept.sum().clamp(min=1)

        @staticmethod
        def backward(ctx, upstream):
            logits, labels, total, kept = ctx.saved_tensors
            scale = (upstream / kept.sum().clamp(min=1)) * kept
            for part, label, norm, weight in zip(*(t.split(1024) for t in (
                    logits, labels.clamp(min=0), total, scale))):
                gradient = part.float().sub_(norm[:, None]).exp_()
                gradient.scatter_add_(1, label[:, None], -torch.ones_like(gradient[:, :1]))
                part.copy_(gradient.mul_(weight[:, None]))
            return logits, None

    class NextTokenLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, labels):
            hidden = self.model.transformer(input_ids=input_ids, use_cache=False)[0]
            logits = self.model.lm_head(hidden[:, :-1].flatten(0, 1))
            return torch.compiler.disable(CrossEntropy.apply)(logits, labels[:, 1:].flatten())

    return NextTokenLoss()


def read_pieces(path, size=1 << 16):
    """Yield the text of a UTF-8 file in pieces of about size characters, cut before white space.

    A byte-order mark is dropped and CRLF read as LF. Raises Refused with the byte offset.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines, rest, offset = io.IncrementalNewlineDecoder(None, translate=True), "", 0
    with open(path, "rb") as file:
        while True:
            data = file.read(size)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise Refused(f"--data {path}: not UTF-8 at byte {offset - pending + error.start}; "
                              "convert it (iconv -t UTF-8)") from None
            rest += lines.decode(text.removeprefix("\ufeff") if offset == 0 else text, not data)
            offset += len(data)
            cut = max(rest.rfind(" "), rest.rfind("\n")) if data else len(rest)
            while data and cut > 0 and rest[cut - 1].isspace():
                cut -= 1
            if cut <= 0 and len(rest) > 64 * size:               # one word of four million letters
                cut = len(rest)
            if cut > 0:
                yield rest[:cut]
                rest = rest[cut:]
            if not data:
                return


def tokenize(path, tokenizer, seq_len, blocks_needed):
    """Tokenize a text once into a temporary file of uint32; returns (file name, token count).

    The whole file is one document unless it holds <|endoftext|>; one is added at the end. Memory
    stays at a few pieces. Raises Refused, and then leaves no file behind.
    """
    import numpy
    handle, name = tempfile.mkstemp(prefix="train_zero2_", suffix=".tokens")
    count, pieces = 0, read_pieces(path)
    try:
        with os.fdopen(handle, "wb") as file:
            while batch := list(itertools.islice(pieces, 64)):
                encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False,
                                    verbose=False).input_ids
                if any(piece.strip() for piece in batch):
                    for ids in encoded:
                        numpy.asarray(ids, dtype=numpy.uint32).tofile(file)
                        count += len(ids)
            if count:
                numpy.asarray([tokenizer.eos_token_id], dtype=numpy.uint32).tofile(file)
                count += 1
        if count < blocks_needed * seq_len:
            raise Refused(f"--data {path}: {count} tokens; one block of {seq_len} per rank and "
                          f"sample needs {blocks_needed * seq_len}; more text, or --seq-len lower")
    except BaseException:
        os.unlink(name)
        raise
    return name, count


class Sentences:
    """The built-in sentences, each padded to seq_len: count samples, so that a step is an epoch."""

    def __init__(self, tokenizer, seq_len, count):
        import torch
        self.samples = []
        for sentence in itertools.islice(itertools.cycle(SENTENCES), count):
            encoded = tokenizer(sentence, padding="max_length", truncation=True,
                                max_length=seq_len, padding_side="right", return_tensors="pt")
            ids, real = encoded.input_ids[0], encoded.attention_mask[0].bool()
            self.samples.append((ids, torch.where(real, ids, IGNORED)))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Blocks:
    """Blocks of seq_len tokens of a tokenized text, read from disk when asked for."""

    def __init__(self, name, seq_len):
        import numpy
        self.tokens = numpy.memmap(name, dtype=numpy.uint32, mode="r")
        self.seq_len = seq_len

    def __len__(self):
        return len(self.tokens) // self.seq_len

    def __getitem__(self, index):
        import torch
        block = self.tokens[index * self.seq_len:(index + 1) * self.seq_len]
        ids = torch.from_numpy(block.astype("int64"))
        return ids, ids


def load_text(args, launch, tokenizer, blocks_needed):
    """Blocks of --data. The first rank of each host tokenizes; the file goes once all have it."""
    outcome = (None, None)
    if launch.local_rank == 0:
        try:
            outcome = (tokenize(args.data, tokenizer, args.seq_len, blocks_needed)[0], None)
        except Refused as error:
            outcome = (None, str(error))
        except OSError as error:
            outcome = (None, f"--data {args.data}: {error.strerror} ({error.filename})")
    outcomes = launch.gather((socket.gethostname(), *outcome))
    names = {host: name for host, name, _ in outcomes if name}
    refusal = next((error for _, _, error in outcomes if error), None)
    blocks = None if refusal else Blocks(names[socket.gethostname()], args.seq_len)
    launch.gather(None)                                           # every rank has opened its file
    if outcome[0]:
        os.unlink(outcome[0])
    if refusal:
        raise Refused(refusal)
    return blocks


def batches(dataset, config, launch, shuffle, seed, start):
    """Yield (epoch, (ids, labels)) for ever, micro-batch after micro-batch, from number start on.

    Every rank gets its own samples in the same number; the order follows from seed and epoch.
    """
    from torch.utils.data import DataLoader, DistributedSampler
    sampler = DistributedSampler(dataset, launch.world_size, launch.rank, shuffle=shuffle,
                                 seed=seed, drop_last=True)
    loader = DataLoader(dataset, config["train_micro_batch_size_per_gpu"], sampler=sampler,
                        drop_last=True)
    for epoch in itertools.count(start // len(loader)):
        sampler.set_epoch(epoch)
        skip = start % len(loader) if epoch == start // len(loader) else 0
        for batch in itertools.islice(loader, skip, None):
            yield epoch, batch


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
        self.current, self.peaks = "start", {}

    def read(self, kind="allocated_bytes", when="current"):
        if self.cuda is None:
            return self.process.memory_info().rss
        return self.cuda.memory_stats_as_nested_dict(self.device).get(kind, {}).get(
            "all", {}).get(when, 0)

    @contextlib.contextmanager
    def phase(self, name):
        self.current = name
        if self.cuda is not None:
            self.cuda.reset_peak_memory_stats(self.device)
        yield
        self.peaks[name] = max(self.peaks.get(name, 0), self.read(when="peak"))

    def take(self):
        peaks, self.peaks = self.peaks, {}
        return peaks


class CollectiveCounter:
    """Counts what DeepSpeed's communication backend is asked for: number and bytes, by kind.

    It stands between deepspeed.comm and torch.distributed, looks at tensor sizes only and
    synchronises nothing. Bytes are those of the whole buffer (for an all-gather the gathered one).
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
    if not launch.on_gpu:
        return None
    with contextlib.suppress(Exception):                     # no NVML, or hidden by a container
        import pynvml
        import torch
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(launch.device).uuid}"
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(
            pynvml.nvmlDeviceGetHandleByUUID(uuid))
        mine = [p for p in processes if p.pid == os.getpid()]
        return (mine or (processes if len(processes) == 1 else [])).pop().usedGpuMemory
    return None


def warm_up_device(launch):
    """Allocate cuBLAS's workspaces in both threads that use it, so that they are in every floor."""
    import torch
    if launch.on_gpu:
        x = torch.ones(64, 64, device=launch.device, dtype=torch.half, requires_grad=True)
        torch.addmm(x[0], x, x).sum().backward()
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------- 7. one run

class StopRequest:
    """Turns the first SIGINT or SIGTERM into a request that all ranks honour after a step."""

    def __init__(self):
        self.signal, self.training = None, False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, number, frame):
        if not self.training or self.signal:
            raise KeyboardInterrupt
        self.signal = number


def repair_baseline(engine, config):
    """Make stage 0 train as stages 1 and 2 do; returns the repairs made, one line each.

    1. DeepSpeed's stage-0 fp16 and bf16 wrappers call step() on zero gradients when they are built
       (src: FP16_UnfusedOptimizer.initialize_optimizer_states): Adam's bias correction is one step
       ahead and the masters are decayed once. Seen in the state's step count; undone by clearing
       the state and copying the weights back into the masters.
    2. At stage 0, fp16, engine.backward does not scale the loss, but step() unscales the gradient.
       Seen by the gradient of a loss of 1; repaired in train_step, which scales the loss.
    """
    import torch
    if config[ZERO + "stage"] or precision_of(config) == "fp32":
        return []
    repairs, inner = [], engine.optimizer.optimizer
    if any(float(state.get("step", 0)) > 0 for state in inner.state.values()):
        inner.state.clear()
        engine.optimizer.refresh_fp32_params()
        repairs.append("optimizer state: one step had been taken at construction; cleared")
    if precision_of(config) == "fp16":
        x = torch.zeros((), device=engine.device, requires_grad=True)
        engine.backward(x * 1.0)
        unscaled = float(x.grad) * config["gradient_accumulation_steps"] == 1
        engine.zero_grad()
        if unscaled and engine.optimizer.loss_scale != 1:
            repairs.append("loss scale: backward() did not apply it; applied by this script")
    return repairs


def train_step(engine, micro_batches, memory, scale_loss):
    """One optimizer step over an iterable of (ids, labels); returns the mean loss, a tensor."""
    total = 0
    for ids, labels in micro_batches:
        with memory.phase("forward"):
            loss = engine(ids.to(engine.device), labels.to(engine.device))
        total += loss.detach()
        with memory.phase("backward"):
            engine.backward(loss * engine.optimizer.loss_scale if scale_loss else loss)
        del loss
        with memory.phase("step"):
            engine.step()
    return total / engine.gradient_accumulation_steps()


def build_engine(run, launch, model, args, memory):
    """deepspeed.initialize on a copy of model; returns the engine and the repairs made."""
    import deepspeed
    import torch
    with memory.phase("init"):
        module = define_loss(copy.deepcopy(model))
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()),
            config=unflatten(run.config | {"steps_per_print": 10 ** 9}))
    if args.compile:
        engine.compile()
    repairs = repair_baseline(engine, run.config)
    torch.manual_seed(args.seed + 1 + launch.rank)            # dropout; the same in every run
    return engine, repairs


def execute(run, launch, model, tokenizer, dataset, args, stop, on_step):
    """Make one run. Returns its record (design of the keys: README.md) on every rank.

    Raises RunFailed for what a user can mend (out of memory, loss not finite). The engine is gone
    when it returns or raises; what stays allocated shows in the next run's floor_bytes.
    """
    import torch
    memory = PeakMemory(launch)
    engine = counter = None
    gc.collect()
    if launch.on_gpu:
        torch.cuda.empty_cache()
    record = {"name": run.name, "config": unflatten(run.config), "swept": run.swept, "steps": [],
              "error": None, "floor_bytes": memory.read()}
    try:
        engine, record["repairs"] = build_engine(run, launch, model, args, memory)
        counter = CollectiveCounter()
        measure(record, run, launch, engine, dataset, args, stop, on_step, memory, counter)
        if args.save and not stop.signal:
            record["saved"] = save_weights(engine, run, launch, model, tokenizer, dataset, args)
        if args.memory_snapshot and launch.on_gpu and not stop.signal:
            snapshot(record, run, launch, engine, dataset, args, memory)
        return record
    except torch.OutOfMemoryError as error:
        raise RunFailed(f"rank {launch.rank}, {memory.current}: {str(error).splitlines()[0][:200]} "
                        "What helps: a smaller train_micro_batch_size_per_gpu, --seq-len or "
                        "reduce_bucket_size, or offload_optimizer") from None
    finally:
        if counter:
            counter.close()
        if engine:
            engine.destroy()
        del engine
        gc.collect()


def measure(record, run, launch, engine, dataset, args, stop, on_step, memory, counter):
    """Train until --steps, filling record: steps, peaks by phase and rank, collectives."""
    import torch
    import torch.distributed as dist
    accumulation = run.config["gradient_accumulation_steps"]
    done = load_checkpoint(engine, launch, args) if args.resume else 0
    record["resumed_from_step"] = done if args.resume else None
    feed = batches(dataset, run.config, launch, args.data is not None, args.seed,
                   done * accumulation)
    scaled = precision_of(run.config) == "fp16"
    scale_loss = any(repair.startswith("loss scale") for repair in record["repairs"])
    overall, steady, resident, collectives, started = memory.take(), {}, 0, {}, False
    init, everyone = overall["init"], torch.empty(launch.world_size, 3, dtype=torch.float64)
    stop.training = True
    for step in range(done + 1, args.steps + 1):
        taken = [next(feed) for _ in range(accumulation)]
        scale = engine.optimizer.loss_scale if scaled else None
        synchronize(launch)
        begin = time.perf_counter()
        loss = train_step(engine, (batch for _, batch in taken), memory, scale_loss)
        synchronize(launch)
        seconds = time.perf_counter() - begin
        # Not timed: the only traffic of the script's own, on the CPU, once a step.
        own = torch.tensor([float(loss), seconds, stop.signal or 0], dtype=torch.float64)
        dist.all_gather_into_tensor(everyone.view(-1), own, group=launch.control)
        mean, applied = everyone[:, 0].mean().item(), bool(engine.was_step_applied())
        peaks, counts = memory.take(), counter.take()
        warm = step - done > WARMUP_STEPS and started
        started |= applied                                    # Adam's state comes with the first
        for phase, peak in peaks.items():
            overall[phase] = max(overall.get(phase, 0), peak)
            if warm and applied:
                steady[phase] = max(steady.get(phase, 0), peak)
        if warm and applied:
            collectives, resident = counts, max(resident, memory.read())
        record["steps"].append({
            "step": step, "loss": mean if math.isfinite(mean) else None,
            "seconds": everyone[:, 1].max().item(), "applied": applied, "loss_scale": scale,
            "warmup": not warm, "epoch": taken[-1][0]})
        on_step(record, max(overall.values()), launch)
        stop.signal = int(everyone[:, 2].max()) or None
        due = stop.signal or step == args.steps or (
            args.checkpoint_every and step % args.checkpoint_every == 0)
        if args.checkpoint and due:
            save_checkpoint(engine, launch, run, args, step)
        if stop.signal:
            break
        if not math.isfinite(mean) and not scaled:
            raise RunFailed(f"step {step}: the loss is not finite; a lower learning rate helps")
    stop.training = False
    pads = sum(float((labels == IGNORED).float().mean()) for _, (_, labels) in taken)
    rows = launch.gather({
        **{phase: steady.get(phase) for phase in PHASES[1:]}, "init": init,
        "steady": max(steady.values(), default=None), "overall": max(overall.values()),
        "resident": resident or None, "reserved": memory.read("reserved_bytes"),
        "device_used": device_used(launch), "padding": pads / accumulation})
    sizes = [p.numel() for p in engine.module.parameters()]
    record.update(summarize(record["steps"], rows, run.config, args.seq_len), collectives=collectives,
                  **expectations(sizes, run.config, launch.world_size))


def synchronize(launch):
    """Wait for the GPU, so that the clock starts and stops on an idle device."""
    import torch
    if launch.on_gpu:
        torch.cuda.synchronize(launch.device)


def summarize(steps, rows, config, seq_len):
    """The record's figures from its steps and the ranks' rows: medians, peaks of the worst rank."""
    seconds = [s["seconds"] for s in steps if s["applied"] and not s["warmup"]]
    median = statistics.median(seconds) if seconds else None
    quarter = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [0, 0, 0]
    ranks = range(len(rows))
    worst = max(ranks, key=lambda r: (rows[r]["steady"] or rows[r]["overall"], -r))
    peaks = {key: max((row[key] for row in rows if row[key] is not None), default=None)
             for key in (*PHASES, "steady", "overall")}
    used = [row["device_used"] for row in rows if row["device_used"]]
    return {
        "skipped_steps": sum(not s["applied"] for s in steps), "median_step_seconds": median,
        "step_seconds_iqr": quarter[2] - quarter[0],
        "tokens_per_second": config["train_batch_size"] * seq_len / median if median else None,
        "tokens_seen": config["train_batch_size"] * seq_len * (steps[-1]["step"] if steps else 0),
        "padding_share": statistics.mean(row.pop("padding") for row in rows),
        "peak_allocated_bytes": peaks, "worst_rank": worst, "peak_allocated_bytes_per_rank": rows,
        "peak_reserved_bytes": max(row["reserved"] for row in rows),
        "device_used_bytes": max(used, default=None)}


def snapshot(record, run, launch, engine, dataset, args, memory):
    """Write the allocator's history of one more step than was measured, for memory_viz."""
    import torch
    feed = batches(dataset, run.config, launch, args.data is not None, args.seed, 0)
    taken = [next(feed)[1] for _ in range(run.config["gradient_accumulation_steps"])]
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    train_step(engine, taken, memory, any("loss scale" in r for r in record["repairs"]))
    path = args.memory_snapshot
    name = re.sub(r"[^\w.=-]+", "_", run.name)
    torch.cuda.memory._dump_snapshot(
        str(path.with_name(f"{path.stem}.{name}.rank{launch.rank}{path.suffix or '.pickle'}")))
    torch.cuda.memory._record_memory_history(enabled=None)


def identity(run, args, world_size):
    """What must be equal for a checkpoint to be gone on from, beside ranks and stage."""
    return {"world_size": world_size, "stage": run.config[ZERO + "stage"],
            "train_batch_size": run.config["train_batch_size"], "model": args.model or "gpt2",
            "seed": args.seed, "seq_len": args.seq_len,
            "data_bytes": args.data.stat().st_size if args.data else None}


def check_resume(run, args, world_size):
    """Refuse to resume where there is nothing, or something else; needs no torch."""
    try:
        tag = (args.checkpoint / "latest").read_text().strip()
        saved = json.loads((args.checkpoint / tag / "train_zero2.json").read_text())
    except (OSError, ValueError):
        raise Refused(f"--resume: no whole checkpoint in {args.checkpoint}; start without "
                      "--resume") from None
    now, universal = identity(run, args, world_size), run.config.get("checkpoint.load_universal")
    if not universal and any(saved[key] != now[key] for key in ("world_size", "stage")):
        folder = args.checkpoint / tag
        raise Refused(
            f"--resume: {folder} holds {saved['world_size']} ranks at stage {saved['stage']}, this "
            f"is {world_size} at {now['stage']}; convert it: (1) python -m deepspeed.checkpoint."
            f"ds_to_universal --inject_missing_state --input_folder {folder} --output_folder "
            f'{folder}_universal (2) add "checkpoint": {{"load_universal": true}} to the JSON')
    for key in list(now)[2:]:
        if saved[key] != now[key]:
            raise Refused(f"--resume: the checkpoint has {key} {saved[key]}, this run {now[key]}")
    if saved["step"] >= args.steps:
        raise Refused(f"--resume: the checkpoint is at step {saved['step']} already; --steps "
                      f"{args.steps} is the total of the whole run")


def save_checkpoint(engine, launch, run, args, step):
    """Write a whole checkpoint, then point `latest` at it, then drop the one before.

    DeepSpeed's own `latest` is written before the other ranks' parts are on disk. Here a kill at
    any moment leaves `latest` on a whole checkpoint.
    """
    import torch
    tag, folder = f"step{step}", args.checkpoint
    try:
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
        state = {"cpu": torch.get_rng_state()}
        if launch.on_gpu:
            state["cuda"] = torch.cuda.get_rng_state(launch.device)
        torch.save(state, folder / tag / f"random_rank{launch.rank}.pt")
        launch.gather(None)                                   # every rank's part is on disk
        if launch.rank == 0:
            saved = identity(run, args, launch.world_size) | {"step": step}
            (folder / tag / "train_zero2.json").write_text(json.dumps(saved))
            replace_file(folder / "latest", tag)
            for old in folder.glob("step*"):
                if old.name.removesuffix("_universal") != tag:
                    shutil.rmtree(old)
        launch.gather(None)
    except OSError as error:
        raise RunFailed(f"checkpoint of step {step}: {error.strerror} ({error.filename}); the one "
                        "before is whole") from None


def load_checkpoint(engine, launch, args):
    """Load what `latest` names into the engine; returns the number of steps done."""
    import torch
    tag = (args.checkpoint / "latest").read_text().strip()
    step = json.loads((args.checkpoint / tag / "train_zero2.json").read_text())["step"]
    universal = engine.load_universal_checkpoint()
    path, _ = engine.load_checkpoint(str(args.checkpoint), tag=tag + "_universal" * universal)
    if path is None:
        raise RunFailed(f"--resume: {args.checkpoint / tag} could not be loaded")
    random = args.checkpoint / tag / f"random_rank{launch.rank}.pt"
    if random.exists():
        state = torch.load(random, weights_only=True)
        torch.set_rng_state(state["cpu"])
        if launch.on_gpu and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], launch.device)
    return step


def save_weights(engine, run, launch, model, tokenizer, dataset, args):
    """Write fp32 master weights and tokenizer for from_pretrained; whole, or not at all.

    Returns {"path", "eval_loss"}: the eval-mode loss of rank 0's first micro-batch at the run's
    precision, which the reloaded weights must give again.
    """
    import torch
    from deepspeed.utils import safe_get_full_fp32_param
    masters = {id(p): p for p in engine.module.parameters()}      # fp32, stage 0: the weights
    if run.config[ZERO + "stage"]:
        masters = {key: safe_get_full_fp32_param(p) for key, p in masters.items()}
    elif hasattr(engine.optimizer, "fp32_groups"):
        pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups)
        masters = {id(p): q for halves, fulls in pairs for p, q in zip(halves, fulls)}
    ids, labels = next(batches(dataset, run.config, launch, args.data is not None, args.seed, 0))[1]
    engine.eval()
    with torch.no_grad():
        loss = float(engine(ids.to(engine.device), labels.to(engine.device)))
    engine.train()
    if launch.rank == 0:
        clone = copy.deepcopy(model)
        weights = {name.removeprefix("model."): masters[id(p)].detach().float().cpu()
                   for name, p in engine.module.named_parameters()}
        clone.load_state_dict(weights, strict=False)              # lm_head is tied to wte
        args.save.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=args.save.name + ".", dir=args.save.parent)
        try:
            clone.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            os.chmod(folder, 0o755)
            os.replace(folder, args.save)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise RunFailed(f"--save {args.save}: {error.strerror or error}") from None
    return {"path": str(args.save), "eval_loss": loss}


# --------------------------------------------------------------------------- 8. several runs

def gpt2_parameters(name):
    """Elements of each parameter of a GPT-2 size, in the order of model.parameters()."""
    width, layers, _ = GPT2_SIZES[name]
    block = [width, width, 3 * width ** 2, 3 * width, width ** 2, width, width, width,
             4 * width ** 2, 4 * width, 4 * width ** 2, width]
    return [50257 * width, 1024 * width, *block * layers, width, width]


def partition(sizes, config, ranks):
    """How stages 1 and 2 lay parameters over ranks (src: stage_1_and_2.py, __init__).

    Returns (elements of one rank's partition, per parameter {rank: elements on it}) in the order
    of sizes; the total is padded to a multiple of 2 x ranks.
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


def expected_bytes(sizes, config, ranks, rank):
    """Bytes that one rank allocates, derived from the config; activations and logits left out.

    Args: sizes (elements per parameter, tied weights once, the token embedding first), config
    (dotted), ranks, rank. Returns {"resident", "gradients", "buckets", "backward", "step"}:
    states between steps; gradients held to the step; reduction buffers; the two phases' peaks.
    Source: stage_1_and_2.py (setup_buckets, get_grad_norm_direct, step), unfused_optimizer.py.
    """
    low, psi, embedding = precision_of(config) != "fp32", sum(sizes), sizes[0]
    b = 2 if low else 4
    if config[ZERO + "stage"] == 0:
        resident, gradients = (b + (12 if low else 8)) * psi, b * psi
        flat = max(stage0_buckets(sizes)) * b
        return {"resident": resident, "gradients": gradients, "buckets": flat,
                "backward": resident + gradients + max(flat, 2 * embedding * b),
                "step": resident + gradients + (4 * psi if low else 0)}
    size, owners = partition(sizes, config, ranks)
    mine = [owner.get(rank, 0) for owner in owners]
    offload = config.get(ZERO + "offload_optimizer.device") == "cpu"
    gradients = 0 if offload else b * sum(n for n, m in zip(sizes, mine) if m)
    resident = b * size * ranks + (b * max(sizes) if offload else 12 * size)
    bucket = config.get(BUCKET, 500_000_000)
    overlap = config.get(ZERO + "overlap_comm", False)
    buffers = bucket * b * (2 if overlap else 1) * config.get(ZERO + "contiguous_gradients", True)
    norm = 8 * max(mine) * config.get(ZERO + "compute_grad_norm", True)
    late = config[ZERO + "stage"] == 1 and not overlap
    held = gradients * min(2, config["gradient_accumulation_steps"])
    backward = buffers + reduction_peak(sizes, owners, rank, bucket, b, held, late)
    step = 0 if offload else gradients + max(norm, size * (b + 4 if low else b))
    return {"resident": resident, "gradients": gradients, "buckets": buffers,
            "backward": resident + backward + norm * offload, "step": resident + step}


def stage0_buckets(sizes):
    """Elements of each flat copy in which stage 0 reduces (src: engine.allreduce_no_retain)."""
    flats = [0]
    for n in sizes:
        flats[-1] += n
        if flats[-1] > STAGE0_BUCKET:
            flats.append(0)
    return [n for n in flats if n]


def reduction_peak(sizes, owners, rank, bucket, b, held, late):
    """Most bytes of gradients and flat copies alive at once in a ZeRO backward, buffers apart.

    Follows reduce_independent_p_g_buckets_and_remove_grads: gradients come last parameter first;
    each is copied into the bucket and freed; a full bucket is reduced, through a flat copy where
    it belongs to several ranks; a rank's own gradients move to a buffer allocated with the first
    of them. The tied embedding's gradient (lm_head's part) is alive from the start, three times
    for the moment in which the embedding's part is added. At stage 1 without overlap_comm (late)
    all gradients wait for the end and are then reduced first parameter first.
    """
    embedding = sizes[0] * b
    live, peak = (sum(sizes) * b, (sum(sizes) + 2 * sizes[0]) * b) if late else (embedding, 0)
    filled, reducing, large, owned = 0, set(), 0, False

    def reduce_bucket():
        nonlocal live, peak, filled, large, owned
        peak = max(peak, live + (filled * b if len(reducing) > 1 else 0))
        if rank in reducing and not owned:
            live, owned = live + held, True
            peak = max(peak, live)
        live, filled, large = live - large, 0, 0
        reducing.clear()

    order = range(len(sizes)) if late else range(len(sizes) - 1, -1, -1)
    for i in order:
        n = sizes[i]
        if not late and i:                                    # the embedding's is alive already
            live += n * b
        peak = max(peak, live + (2 * embedding if i == 0 and not late else 0))
        if filled and filled + n > bucket:
            reduce_bucket()
        if n > bucket:
            large = n * b                                     # reduced by itself, in place
        else:
            live -= n * b
        filled += n
        reducing.update(owners[i])
    reduce_bucket()
    return peak


def expectations(sizes, config, ranks):
    """expected_bytes of the rank that needs most, and of every rank."""
    every = [expected_bytes(sizes, config, ranks, rank) for rank in range(ranks)]
    return {"expected_bytes": {key: max(e[key] for e in every) for key in every[0]},
            "expected_bytes_per_rank": every}


def time_noise(*runs):
    """Seconds under which two medians count as equal."""
    return max(max(TIME_NOISE * r["median_step_seconds"], r["step_seconds_iqr"]) for r in runs)


def same_peak(a, b):
    return abs(a - b) <= MEMORY_NOISE * max(a, b)


def reductions(run):
    """Gradient reductions of one step: how many, control traffic left out."""
    return sum(run["collectives"].get(k, {}).get("count", 0)
               for k in ("all_reduce", "reduce", "reduce_scatter_tensor"))


def stage_of(run):
    return run["config"]["zero_optimization"]["stage"]


def compare(runs, environment):
    """The verdicts over the records of a launch, in a fixed order; pure."""
    whole = [run for run in runs if not run["error"] and run["steps"]]
    steady = [run for run in whole if run["median_step_seconds"]]
    memory = "" if environment["memory_kind"] == "cuda_allocator" else (
        "no GPU: the resident set keeps what earlier runs freed")
    verdicts = [loss_falls(whole, environment["data"]), loss_agrees(whole),
                memory_saved(steady, environment["world_size"], memory),
                bucket_effect(steady, memory, environment["share_gpu"]),
                knob_without_effect(steady, memory)]
    return [{"name": name, "outcome": outcome, "detail": detail}
            for name, (outcome, detail) in zip(VERDICTS, verdicts)]


VERDICTS = ("loss_falls", "loss_agrees", "memory_saved", "bucket_effect", "knob_without_effect")
NA = "NOT APPLICABLE"


def loss_falls(runs, own_text):
    """On every run: finite, and the fourth applied step's loss below the first's."""
    details, outcome = [], "PASS" if runs else "FAIL"
    for run in runs:
        losses = [s["loss"] for s in run["steps"] if s["applied"]]
        if not losses:
            outcome, text = "FAIL", f"all {len(run['steps'])} steps were skipped: overflow at a " \
                f"loss scale of {run['steps'][-1]['loss_scale']:g}; a lower one helps"
        elif None in losses:
            outcome, text = "FAIL", "a loss is not finite"
        elif len(losses) < 2 or run["resumed_from_step"]:
            outcome = outcome if outcome == "FAIL" else NA
            text = "resumed" if run["resumed_from_step"] else "one applied step"
        else:
            tenth = math.ceil(len(losses) / 10) if own_text else 1
            first = statistics.mean(losses[:tenth])
            last = statistics.mean(losses[-tenth:]) if own_text else losses[:4][-1]
            outcome = outcome if last < first else "FAIL"
            text = f"{first:.4f} to {last:.4f}" + (
                f" (means of {tenth})" if own_text else f" after {len(losses[:4]) - 1} steps")
        details.append(f"{run['name']}: {text}")
    return outcome, "; ".join(details) or "no run finished"


def loss_agrees(runs):
    """Every run's losses equal the first's, step by step, until one of them alone skips a step."""
    if len(runs) < 2:
        return NA, "one run"
    first, details, outcome = runs[0], [], "PASS"
    for run in runs[1:]:
        ours, theirs = ({k: v for k, v in flatten(r["config"]).items() if ZERO not in k}
                        for r in (run, first))
        other = next((k for k in {**ours, **theirs} if ours.get(k) != theirs.get(k)), None)
        pairs = list(zip(run["steps"], first["steps"]))
        skip = next((a["step"] for a, b in pairs if a["applied"] != b["applied"]), None)
        compared = [(a["loss"], b["loss"]) for a, b in pairs if skip is None or a["step"] <= skip]
        if other:
            outcome, text = outcome if outcome == "FAIL" else NA, f"trains otherwise: {other}"
        elif any(None in pair for pair in compared) or not compared:
            outcome, text = outcome if outcome == "FAIL" else NA, "a loss is not finite"
        else:
            gap = max(abs(a - b) / abs(b) for a, b in compared)
            if gap > LOSS_TOLERANCE:
                outcome = "FAIL"
            elif skip:
                outcome = outcome if outcome == "FAIL" else NA
            text = f"within {gap:.1e} over {len(compared)} steps (tolerance {LOSS_TOLERANCE:g})" + (
                f"; only one of the two skipped step {skip}, which ends the comparison"
                if skip else "")
        details.append(f"{run['name']}: {text}")
    return outcome, f"against {first['name']}: " + "; ".join(details)


def memory_saved(runs, ranks, unknown):
    """Stage 2's peak below stage 0's, expected beside measured, by optimizer and gradients."""
    by_stage = {}
    for run in runs:
        by_stage.setdefault(stage_of(run), run)
    if unknown or ranks == 1 or not {0, 2} <= set(by_stage):
        return NA, unknown or ("one rank: nothing is partitioned" if ranks == 1
                               else "needs a run at stage 0 and one at stage 2")
    peak = {stage: run["peak_allocated_bytes"]["steady"] for stage, run in by_stage.items()}
    expected = {stage: run["floor_bytes"] + max(run["expected_bytes"][k] for k in (
        "backward", "step")) for stage, run in by_stage.items()}
    text = (f"stage 0 {peak[0] / MB:.0f} MB, stage 2 {peak[2] / MB:.0f} MB: "
            f"{1 - peak[2] / peak[0]:.1%} less (expected without activations "
            f"{expected[0] / MB:.0f} and {expected[2] / MB:.0f}: "
            f"{1 - expected[2] / expected[0]:.1%})")
    if 1 in peak:
        gradients = peak[1] - peak[2]
        text += (f"; optimizer states (0 to 1) {(peak[0] - peak[1]) / MB:.0f} MB, gradients (1 to "
                 f"2) {gradients / MB:.0f} MB")
        text += ("; stage 2 adds nothing to stage 1 here" if gradients <= MEMORY_NOISE * peak[1]
                 else "")
    if same_peak(peak[0], peak[2]):
        return NA, text + "; within the noise"
    return "PASS" if peak[2] < peak[0] else "FAIL", text


def groups_by(runs, key):
    """Lists of runs that differ in key alone (two values or more), each sorted by it."""
    groups = {}
    for run in runs:
        flat = flatten(run["config"])
        if key in flat:
            rest = json.dumps({k: v for k, v in flat.items() if k != key}, sort_keys=True)
            groups.setdefault(rest, []).append((flat[key], run))
    return [sorted(g, key=lambda pair: pair[0]) for g in groups.values()
            if len({value for value, _ in g}) > 1]


def bucket_effect(runs, unknown, shared):
    """Smallest against largest reduce_bucket_size: more reductions, less memory, longer step."""
    groups = groups_by([run for run in runs if stage_of(run)], BUCKET)
    details, outcomes = [], []
    for group in groups:
        (small_size, small), (large_size, large) = group[0], group[-1]
        counts = reductions(small), reductions(large)
        peaks = [r["peak_allocated_bytes"] for r in (small, large)]
        seconds = [r["median_step_seconds"] for r in (small, large)]
        parts = [("reductions", "{} and {}".format(*counts), counts[0] - counts[1], 0, "")]
        parts.append(("backward peak", "{:.0f} and {:.0f} MB".format(
            *(p["backward"] / MB for p in peaks)), peaks[1]["backward"] - peaks[0]["backward"],
            MEMORY_NOISE * peaks[1]["backward"], unknown))
        parts.append(("step", "{:.1f} and {:.1f} ms".format(*(s * 1e3 for s in seconds)),
                      seconds[0] - seconds[1], time_noise(small, large),
                      "ranks share a GPU" if shared else ""))
        texts = []
        for label, figures, gain, noise, reason in parts:
            outcome = NA if reason or abs(gain) <= noise else "PASS" if gain > 0 else "FAIL"
            outcomes.append(outcome)
            reason = reason or "within the noise" if outcome == NA else ""
            texts.append(f"{label} {figures} {outcome}{f' ({reason})' if reason else ''}")
        if not unknown and same_peak(peaks[0]["steady"], peaks[1]["steady"]):
            sets = max(PHASES[1:], key=lambda phase: peaks[0][phase])
            texts.append(f"overall peak unmoved, set by {sets}")
        details.append(f"{small['name']} against {large_size:g}: " + ", ".join(texts))
    outcome = next((o for o in ("FAIL", "PASS") if o in outcomes), NA)
    return outcome, "; ".join(details) or "no two runs differ in reduce_bucket_size alone"


WHY_WITHOUT_EFFECT = {
    ALLGATHER_BUCKET: "DeepSpeed gathers everything at once where torch has "
                      "all_gather_into_tensor (src: runtime/utils.py, all_gather_dp_groups)",
    BUCKET: "the model's gradients fit into either bucket"}


def knob_without_effect(runs, unknown):
    """PASS where a swept key changed nothing: same collectives, same peaks, times within noise."""
    details, outcome = [], NA
    for key in {key: None for run in runs for key in run["swept"] if key != ZERO + "stage"}:
        for group in groups_by(runs, key):
            low = group[0][1]
            name = f"{key.removeprefix(ZERO)} ({group[0][0]} to {group[-1][0]})"
            same = all(run["collectives"] == low["collectives"] for _, run in group) and all(
                unknown or same_peak(run["peak_allocated_bytes"][phase],
                                     low["peak_allocated_bytes"][phase])
                for _, run in group for phase in PHASES[1:]) and all(
                abs(run["median_step_seconds"] - low["median_step_seconds"])
                <= time_noise(run, low) for _, run in group)
            if same:
                outcome = "PASS"
                details.append(f"{name} changed nothing" + (
                    f": {WHY_WITHOUT_EFFECT[key]}" if key in WHY_WITHOUT_EFFECT else ""))
            else:
                details.append(f"{name} changed something")
    return outcome, "; ".join(details) + f" ({unknown})" * bool(details and unknown) or (
        "no key but the stage was swept")


def recommend(runs, environment):
    """After a sweep: the lowest peak among the runs as fast as the fastest; None where unknown."""
    runs = [r for r in runs if not r["error"] and r["median_step_seconds"]]
    if len(runs) < 2 or not any(r["swept"] for r in runs) or (
            environment["memory_kind"] != "cuda_allocator"):
        return None
    fastest = min(runs, key=lambda r: r["median_step_seconds"])
    tied = [r for r in runs if r["median_step_seconds"] - fastest["median_step_seconds"]
            <= time_noise(r, fastest)]
    best = min(tied, key=lambda r: (r["peak_allocated_bytes"]["steady"], r["median_step_seconds"]))
    smallest = min(runs, key=lambda r: r["peak_allocated_bytes"]["steady"])
    peaks = [r["peak_allocated_bytes"]["steady"] for r in (best, smallest)]
    slower = smallest["median_step_seconds"] / best["median_step_seconds"] - 1
    others = [r["name"] for r in tied if r is not best]
    return {"run": best["name"], "peak_bytes": peaks[0],
            "median_step_seconds": best["median_step_seconds"], "as_fast": others,
            "cost_of_less": None if same_peak(*peaks) else
            f"{smallest['name']} needs {(peaks[0] - peaks[1]) / MB:.0f} MB less, {slower:+.0%} time",
            "comparable_time": not environment["share_gpu"]}


def project(run, environment):
    """What the run's config would need elsewhere: per GPT-2 size and rank count, worst rank.

    Returns {"ranks": [...], "rows": {model: [(resident, peak) or None, ...]}, "activations_bytes"
    (measured backward peak less what is expected; in the measured model's row), "buckets"}.
    """
    config, ranks = flatten(run["config"]), sorted({1, 2, 4, 8, 16, 64, environment["world_size"]})
    peaks = run["peak_allocated_bytes"]
    activations = None
    if environment["memory_kind"] == "cuda_allocator" and peaks["backward"]:
        activations = max(0, peaks["backward"] - run["expected_bytes"]["backward"])
    rows = {}
    for model in list(GPT2_SIZES)[1:]:
        sizes, measured = gpt2_parameters(model), model == environment["model"]
        cells = []
        for n in ranks:
            worst = expectations(sizes, config, n)["expected_bytes"]
            extra = activations if measured and activations else 0
            cells.append((worst["resident"], max(worst["backward"] + extra, worst["step"])))
        rows[model] = cells
    return {"ranks": ranks, "rows": rows, "activations_bytes": activations,
            "buckets": run["expected_bytes"]["buckets"]}


# ------------------------------------------------------------------------------- 9. output

def replace_file(path, text):
    """Write a small file whole or not at all."""
    part = Path(path).with_name(Path(path).name + ".part")
    part.write_text(text)
    os.replace(part, path)


def write_record(path, record):
    """The whole record as JSON; not finite numbers are refused, so that every parser reads it."""
    try:
        replace_file(path, json.dumps(record, indent=1, allow_nan=False))
    except OSError as error:
        raise RunFailed(f"--json {path}: {error.strerror}") from None


def size(value):
    return "-" if value is None else f"{value / MB:,.0f}"


def print_header(environment, notices):
    e = environment
    print(f"train_zero2: {e['model']} ({e['weights']} weights, {e['parameters'] / 1e6:.1f} M "
          f"parameters, {e['vocabulary']} tokens) on {e['world_size']} rank(s), {e['device']}, "
          f"{e['backend']}; torch {e['torch']}, deepspeed {e['deepspeed']}, transformers "
          f"{e['transformers']}")
    for notice in notices:
        print(f"note: {notice}")


def print_step(record, peak, launch, bar=[]):
    """The line of the step just made; on a terminal a bar for long runs, else fewer lines."""
    step, total = record["steps"][-1], launch.total_steps
    every = max(1, total // 50)
    rate = record["config"]["train_batch_size"] * launch.seq_len / step["seconds"]
    scale = f"  scale {step['loss_scale']:g}" if step["loss_scale"] else ""
    loss = "not finite" if step["loss"] is None else f"{step['loss']:.4f}"
    line = (f"step {step['step']:>3}  loss {loss}  {step['seconds'] * 1e3:8.1f} ms  "
            f"{rate:9,.0f} tokens/s{scale}{'' if step['applied'] else '  skipped'}  peak "
            f"{size(peak)} MB{'  warm-up' if step['warmup'] else ''}")
    if launch.rank:
        return
    if total > 50 and sys.stderr.isatty():
        from tqdm import tqdm
        if not bar:
            bar.append(tqdm(total=total, initial=step["step"] - 1, unit="step"))
        bar[0].set_postfix_str(line.split("  ", 1)[1])
        bar[0].update()
        if step["step"] == total:
            bar.pop().close()
    elif step["step"] % every == 0 or step["step"] <= 4:
        print(line, flush=True)


def print_run(run, environment):
    """One run's memory by phase, expected beside measured, and its rates."""
    peaks, expected = run["peak_allocated_bytes"], run["expected_bytes"]
    kind = environment["memory_kind"]
    on_gpu, floor = kind == "cuda_allocator", run["floor_bytes"]
    rows = run["peak_allocated_bytes_per_rank"]
    resident = max((row["resident"] or 0 for row in rows), default=0) or None
    print(f"\n{'MB, worst rank':<16}{'resident':>10}" + "".join(f"{p:>10}" for p in PHASES))
    measured = [resident] + [peaks[phase] for phase in PHASES]
    print(f"{'measured':<16}" + "".join(f"{size(v):>10}" for v in measured)
          + ("" if on_gpu else "   (resident set at the end of each phase)"))
    if on_gpu:
        model = [floor + expected["resident"], None, None, floor + expected["backward"],
                 floor + expected["step"]]
        print(f"{'expected':<16}" + "".join(f"{size(v):>10}" for v in model))
        print(f"{'remainder':<16}" + "".join(
            f"{size(None if v is None or m is None else m - v):>10}"
            for m, v in zip(measured, model)) + "   activations, logits, fragments")
        print(f"worst rank {run['worst_rank']}; steady peak {size(peaks['steady'])} MB; floor "
              f"{size(floor)} MB (cuBLAS workspace); reserved {size(run['peak_reserved_bytes'])} "
              f"MB; on the device {size(run['device_used_bytes'])} MB (with CUDA context, NCCL)"
              .replace("device - MB", "device: not available"))
    for repair in run["repairs"]:
        print(f"repaired: {repair}")
    if run["median_step_seconds"]:
        print(f"median step {run['median_step_seconds'] * 1e3:.1f} ms (interquartile range "
              f"{run['step_seconds_iqr'] * 1e3:.1f}), {run['tokens_per_second']:,.0f} tokens/s, "
              f"{run['padding_share']:.0%} padding; " + (", ".join(
                  f"{kind} {c['count']} x, {c['bytes'] / MB:,.1f} MB"
                  for kind, c in run["collectives"].items()) or "no collectives"))
    if run["skipped_steps"]:
        print(f"{run['skipped_steps']} step(s) skipped by the loss scaler")
    label = "Peak GPU memory" if on_gpu else "Peak resident set (CPU)"
    print(f"{label}: {peaks['overall'] / GB:.2f} GB", flush=True)


def print_comparison(runs, verdicts, recommendation):
    """The table of all runs, the verdicts and the recommendation."""
    if len(runs) > 1:
        width = max(len(run["name"]) for run in runs) + 2
        print(f"\n{'run':<{width}}{'backward':>10}{'step':>10}{'steady':>10}{'expected':>10}"
              f"{'rank':>6}{'reduce':>8}{'ms':>9}{'last loss':>11}   (MB, worst rank)")
    for run in runs if len(runs) > 1 else []:
        if run["error"]:
            print(f"{run['name']:<{width}}failed: {run['error']}")
            continue
        peaks, expected = run["peak_allocated_bytes"], run["expected_bytes"]
        want = run["floor_bytes"] + max(expected["backward"], expected["step"])
        median, last = run["median_step_seconds"], run["steps"][-1]["loss"]
        print(f"{run['name']:<{width}}{size(peaks['backward']):>10}{size(peaks['step']):>10}"
              f"{size(peaks['steady']):>10}{size(want):>10}{run['worst_rank']:>6}"
              f"{reductions(run):>8}{f'{median * 1e3:.1f}' if median else '-':>9}"
              f"{'-' if last is None else f'{last:.4f}':>11}")
    print()
    for verdict in verdicts:
        print(f"{verdict['outcome']:<15} {verdict['name']}: {verdict['detail']}")
    if recommendation:
        r = recommendation
        print(f"recommended: {r['run']}: {size(r['peak_bytes'])} MB, "
              f"{r['median_step_seconds'] * 1e3:.1f} ms"
              + (f"; as fast within the noise: {', '.join(r['as_fast'])}" if r["as_fast"] else "")
              + f"; {r['cost_of_less'] or 'no other setting needs less'}"
              + ("" if r["comparable_time"] else " (ranks share a GPU: times only rank settings)"))


def print_projection(projection, run, environment):
    """Model states and peak of the same config at other sizes and rank counts."""
    activations = projection["activations_bytes"]
    print(f"\nexpected with {run['name']}, GB on the worst rank: resident / peak"
          + (f" (* with the {activations / MB:.0f} MB of activations measured here)"
             if activations else " (activations not counted)"))
    print(f"{'ranks':<14}" + "".join(f"{n:>15}" for n in projection["ranks"]))
    for model, cells in projection["rows"].items():
        mine = model == environment["model"]
        texts = [f"{low / GB:.2f} / {high / GB:.2f}" + (
            "<" if mine and n == environment["world_size"] else "*" if mine and activations else "")
            for n, (low, high) in zip(projection["ranks"], cells)]
        print(f"{model:<14}" + "".join(f"{text:>15}" for text in texts))
    print("< this run")


def plot(path, runs, environment):
    """PNG: peak by phase with expected marked, loss curves, and a bucket sweep on a log axis."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    runs = [run for run in runs if not run["error"] and run["median_step_seconds"]]
    swept = groups_by([r for r in runs if stage_of(r)], BUCKET)
    figure, axes = pyplot.subplots(1, 3 if swept else 2, figsize=(15 if swept else 11, 4.5),
                                   layout="constrained")
    colours = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"]
    phases, width = PHASES[1:], 0.8 / max(1, len(runs))
    for i, run in enumerate(runs):
        colour, hatch = colours[i % 7], ("", "//", "..", "xx")[i // 7 % 4]
        at = [p + (i - (len(runs) - 1) / 2) * width for p in range(len(phases))]
        axes[0].bar(at, [run["peak_allocated_bytes"][p] / GB for p in phases], width * 0.92,
                    color=colour, hatch=hatch, label=run["name"])
        if environment["memory_kind"] == "cuda_allocator":
            marks = [(run["floor_bytes"] + run["expected_bytes"][p]) / GB for p in phases[1:]]
            axes[0].plot(at[1:], marks, "k_", markersize=9,
                         label="expected" if i == len(runs) - 1 else None)
        steps = [(s["step"], s["loss"]) for s in run["steps"] if s["loss"] is not None]
        axes[1].plot(*zip(*steps), color=colour, linestyle=("-", "--", ":", "-.")[i % 4],
                     linewidth=1 + 3 * (len(runs) - i) / len(runs), label=run["name"])
    axes[0].set_xticks(range(len(phases)), phases)
    axes[0].set(title=f"{environment['model']}, {environment['world_size']} ranks: memory peak",
                ylabel="GB on the worst rank", ylim=(0, axes[0].get_ylim()[1] * 1.1))
    axes[1].set(title="Loss (curves lie over each other)", xlabel="step", ylabel="loss")
    for axis in axes[:2]:
        axis.legend(fontsize=7)
    for group, style in zip(swept, ("o-", "s--", "^:", "d-.")):
        sizes = [value for value, _ in group]
        name = re.sub(r" ?reduce_bucket_size=\S+", "", group[0][1]["name"])
        axes[2].semilogx(sizes, [r["median_step_seconds"] * 1e3 for _, r in group], style,
                         color=colours[0], label=f"step time, {name}")
        if axes[2] not in getattr(figure, "twins", {}):
            figure.twins = {axes[2]: axes[2].twinx()}
        twin = figure.twins[axes[2]]
        twin.plot(sizes, [r["peak_allocated_bytes"]["backward"] / GB for _, r in group], style,
                  color=colours[5], label=f"backward peak, {name}")
        axes[2].set(title="Bucket size", xlabel="reduce_bucket_size (elements)")
        axes[2].set_ylabel("median step (ms)", color=colours[0])
        twin.set_ylabel("backward peak (GB)", color=colours[5])
        lines = axes[2].get_lines() + twin.get_lines()
        axes[2].legend(lines, [line.get_label() for line in lines], fontsize=7)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise RunFailed(f"--plot {path}: {error.strerror}") from None


# --------------------------------------------------------------------------------- 10. main

def describe(args, launch, found, model, runs):
    """The record's environment: what the figures depend on."""
    import deepspeed
    import torch
    import transformers
    return {"command": " ".join(sys.argv), "world_size": launch.world_size,
            "backend": launch.backend, "share_gpu": launch.shared,
            "device": torch.cuda.get_device_name(launch.device) if launch.on_gpu else "CPU",
            "memory_kind": "cuda_allocator" if launch.on_gpu else "resident_set",
            "torch": torch.__version__, "deepspeed": deepspeed.__version__,
            "transformers": transformers.__version__, "model": found["name"],
            "weights": "pretrained" if found["pretrained"] else "random",
            "vocabulary": "GPT-2" if found["vocabulary"] == "model" else "byte",
            "parameters": sum(p.numel() for p in model.parameters()),
            "precision": precision_of(runs[0].config), "seq_len": args.seq_len,
            "seed": args.seed, "steps": args.steps, "notices": launch.notices,
            "data": str(args.data) if args.data else None}


def settle_precision(runs, args, launch):
    """auto: fp32 where the device cannot do the JSON's precision; asked for by flag: refused."""
    from deepspeed.accelerator import get_accelerator
    can = {"fp16": get_accelerator().is_fp16_supported(), "fp32": True,
           "bf16": get_accelerator().is_bf16_supported()}
    for run in runs:
        wanted = precision_of(run.config)
        if can[wanted]:
            continue
        if args.precision != "auto":
            raise Refused(f"--precision {wanted}: this device cannot do it; use fp32")
        run.config[f"{wanted}.enabled"] = False
        notice = f"{wanted} is not to be had on this device: training in fp32."
        if notice not in launch.notices:
            launch.notices.append(notice)


def train(args, runs, launch, stop):
    """Connect, load, make every run, compare; returns the exit status."""
    connect(launch, args.share_gpu)
    settle_precision(runs, args, launch)
    found = launch.decide(find_model, args)
    if found["hub"] and launch.rank:
        found["folder"] = fetch(found["hub"], local=False)
    launch.notices += [found["notice"]] if found["notice"] else []
    tokenizer = load_tokenizer(found)
    needed = launch.world_size * max(
        run.config["train_micro_batch_size_per_gpu"] for run in runs)
    text = load_text(args, launch, tokenizer, needed) if args.data else None
    model = load_model(found, args.seed)
    if args.seq_len > model.config.n_positions:
        raise Refused(f"--seq-len {args.seq_len}: {found['name']} has {model.config.n_positions} "
                      "positions")
    if len(tokenizer) > model.config.vocab_size:
        raise Refused(f"--model {found['name']}: {len(tokenizer)} tokens in the vocabulary, "
                      f"{model.config.vocab_size} in the model; they do not belong together")
    warm_up_device(launch)
    record = {"schema": 1, "environment": describe(args, launch, found, model, runs), "runs": [],
              "verdicts": [], "recommendation": None}
    launch.total_steps, launch.seq_len = args.steps, args.seq_len
    if launch.rank == 0:
        print_header(record["environment"], launch.notices)
    for run in runs:
        if launch.rank == 0 and len(runs) > 1:
            print(f"\n== {run.name}")
        dataset = text or Sentences(tokenizer, args.seq_len, run.config["train_batch_size"])
        record["runs"].append(one_of(run, launch, model, tokenizer, dataset, args, stop))
        if launch.rank == 0:
            finished = record["runs"][-1]
            print(f"failed: {finished['error']}") if finished["error"] else print_run(
                finished, record["environment"])
            if args.json:
                write_record(args.json, record)
        if stop.signal:
            break
    if launch.rank == 0:
        record["verdicts"] = compare(record["runs"], record["environment"])
        record["recommendation"] = recommend(record["runs"], record["environment"])
        report(args, record)
    failed = any(run["error"] for run in record["runs"]) or any(
        verdict["outcome"] == "FAIL" for verdict in record["verdicts"])
    failed = launch.decide(lambda: failed)
    return 128 + signal.SIGINT if stop.signal else int(failed)


def one_of(run, launch, model, tokenizer, dataset, args, stop):
    """execute, with a failure that all ranks share turned into a record with an error."""
    import datetime
    import torch.distributed as dist
    try:
        return execute(run, launch, model, tokenizer, dataset, args, stop, print_step)
    except RunFailed as error:
        message = str(error)
    dist.monitored_barrier(launch.control, datetime.timedelta(seconds=AGREE_TIMEOUT_SECONDS))
    return {"name": run.name, "config": unflatten(run.config), "swept": run.swept, "steps": [],
            "error": message}


def report(args, record):
    """Everything that comes after the last run, on rank 0."""
    print_comparison(record["runs"], record["verdicts"], record["recommendation"])
    last = next((r for r in reversed(record["runs"]) if not r["error"] and stage_of(r)), None)
    if last:
        projection = project(last, record["environment"])
        print_projection(projection, last, record["environment"])
    if args.json:
        write_record(args.json, record)
    if args.plot:
        plot(args.plot, record["runs"], record["environment"])


def leave(launch, message, status):
    """Say message once per launch and exit: other ranks wait, so that rank 0 is heard first."""
    if launch.rank:
        sys.stdout.flush()
        time.sleep(REFUSAL_DELAY_SECONDS)
    print(f"train_zero2: {message}", file=sys.stderr, flush=True)
    os._exit(status)                       # past NCCL and gloo threads that wait for other ranks


def main(argv=None):
    launch = Launch(int(os.environ.get("RANK", "0") or 0), 1, 0)
    try:
        launch = read_launch()
        args = parse_arguments(argv)
        runs = plan_runs(args, launch.world_size)
        check_outputs(args, len(runs))
        if args.resume:
            check_resume(runs[0], args, launch.world_size)
        if not args.verbose:
            logging.disable(logging.WARNING)
            warnings.filterwarnings("ignore")
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        stop = StopRequest()
        status = train(args, runs, launch, stop)
    except Refused as error:
        leave(launch, f"refused: {error}", 2)
    except RunFailed as error:
        leave(launch, f"failed: {error}", 1)
    except KeyboardInterrupt:
        leave(launch, "interrupted", 130)
    import torch.distributed as dist
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
